// A client of bngrad in C++17, small enough to copy. It needs gRPC and the code that protoc makes of the .proto files.
#pragma once

#include <chrono>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "bngrad_protos/v1/batch_norm_grad.grpc.pb.h"
#include "google/rpc/bad_request.pb.h"

namespace bngrad {

// Paths of files; an empty one is not used.
struct Options {
  std::string ca;           // authorities of the server's certificate (PEM); with one, connections use TLS
  std::string certificate;  // the certificate of this client (PEM)
  std::string key;          // its key (PEM)
  std::string token_file;
};

inline std::string ReadFile(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

// A float32 tensor of a request. The host must be little-endian: so is Tensor.data.
inline v1::Tensor ToTensor(const std::vector<float>& values, const std::vector<int64_t>& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

// The elements of a float32 tensor of a response.
inline std::vector<float> Values(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  tensor.data().copy(reinterpret_cast<char*>(values.data()), values.size() * sizeof(float));
  return values;
}

// What a status says about the fields of the request.
inline std::vector<google::rpc::BadRequest::FieldViolation> Violations(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::BadRequest bad_request;
  std::vector<google::rpc::BadRequest::FieldViolation> violations;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    if (!detail.UnpackTo(&bad_request)) continue;
    const auto& found = bad_request.field_violations();
    violations.insert(violations.end(), found.begin(), found.end());
  }
  return violations;
}

// Calls a server; threads may share it.
class Client {
 public:
  using Stub = v1::BatchNormGradService::Stub;

  explicit Client(const std::string& target, const Options& options = {}) {
    auto credentials = grpc::InsecureChannelCredentials();
    if (!options.ca.empty()) {
      credentials = grpc::SslCredentials({ReadFile(options.ca), ReadFile(options.key), ReadFile(options.certificate)});
    }
    std::istringstream(ReadFile(options.token_file)) >> token_;
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);  // unlimited; the default is 4 MiB
    stub_ = v1::BatchNormGradService::NewStub(grpc::CreateCustomChannel(target, credentials, arguments));
  }

  // Calls an op, such as &Client::Stub::FusedBatchNormGradV3.
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*op)(grpc::ClientContext*, const Request&, Response*), const Request& request,
                    Response* response, std::chrono::seconds timeout = std::chrono::seconds(60)) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    if (!token_.empty()) context.AddMetadata("authorization", "Bearer " + token_);
    return (stub_.get()->*op)(&context, request, response);
  }

 private:
  std::string token_;
  std::unique_ptr<Stub> stub_;
};

}  // namespace bngrad
