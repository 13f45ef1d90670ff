// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//   client localhost:50051          sends a small batch
//   client unix:PATH 2048           sends a batch of 2048 images
//   client localhost:50051 --bad    sends a scale of the wrong length
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "bngrad_protos/v1/batch_norm_grad.grpc.pb.h"
#include "google/rpc/bad_request.pb.h"

namespace pb = bngrad::v1;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr int kHeight = 8, kWidth = 8, kChannels = 16;
constexpr float kEpsilon = 1e-3f;

struct Inputs {
  Floats y_backprop, x, scale, mean, variance;
};

struct Gradients {
  Doubles x_backprop, scale_backprop, offset_backprop;
};

Floats Uniform(size_t size, float low, float high) {
  static std::mt19937 generator(0);
  std::uniform_real_distribution<float> distribution(low, high);
  Floats values(size);
  for (float& value : values) value = distribution(generator);
  return values;
}

Inputs RandomInputs(int batch) {
  const size_t size = size_t(batch) * kHeight * kWidth * kChannels;
  Inputs in{Uniform(size, -1, 1), Uniform(size, -1, 1), Uniform(kChannels, 0.5, 1.5), {}, {}};
  Doubles sum(kChannels), sum_of_squares(kChannels);
  for (size_t i = 0; i < size; ++i) {
    sum[i % kChannels] += in.x[i];
    sum_of_squares[i % kChannels] += double(in.x[i]) * in.x[i];
  }
  const double m = double(size) / kChannels;
  for (int c = 0; c < kChannels; ++c) {
    in.mean.push_back(sum[c] / m);
    in.variance.push_back(sum_of_squares[c] / m - sum[c] / m * sum[c] / m);
  }
  return in;
}

Gradients Expected(const Inputs& in) {
  const size_t size = in.x.size();
  const double m = double(size) / kChannels;
  Doubles rstd(kChannels), sum_dy(kChannels), sum_dy_xc(kChannels);
  for (size_t i = 0; i < size; ++i) {
    const size_t c = i % kChannels;
    sum_dy[c] += in.y_backprop[i];
    sum_dy_xc[c] += in.y_backprop[i] * (double(in.x[i]) - in.mean[c]);
  }
  Gradients out{Doubles(size), Doubles(kChannels), sum_dy};
  for (int c = 0; c < kChannels; ++c) {
    rstd[c] = 1 / std::sqrt(double(in.variance[c]) + kEpsilon);
    out.scale_backprop[c] = rstd[c] * sum_dy_xc[c];
  }
  for (size_t i = 0; i < size; ++i) {
    const size_t c = i % kChannels;
    const double xc = double(in.x[i]) - in.mean[c];
    out.x_backprop[i] = in.scale[c] * rstd[c] *
                        (in.y_backprop[i] - sum_dy[c] / m - xc * rstd[c] * rstd[c] * sum_dy_xc[c] / m);
  }
  return out;
}

// The host must be little-endian: so is Tensor.data.
pb::Tensor ToTensor(const Floats& values, const std::vector<int64_t>& shape) {
  pb::Tensor tensor;
  tensor.set_dtype(pb::DATA_TYPE_FLOAT32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

bool Matches(const std::string& name, const pb::Tensor& tensor, const Doubles& expected, double tolerance) {
  if (tensor.data().size() != expected.size() * sizeof(float)) throw std::runtime_error(name + " has a wrong size");
  const auto* values = reinterpret_cast<const float*>(tensor.data().data());
  double error = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error = std::max(error, std::abs(values[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  std::cout << name << " (";
  for (int i = 0; i < tensor.shape_size(); ++i) std::cout << (i ? ", " : "") << tensor.shape(i);
  std::cout << "): largest error " << error / largest << " of the largest value\n";
  return error <= tolerance * largest;
}

void PrintError(const grpc::Status& status) {
  const bool invalid = status.error_code() == grpc::StatusCode::INVALID_ARGUMENT;
  std::cerr << (invalid ? "INVALID_ARGUMENT" : "status " + std::to_string(status.error_code())) << ": "
            << status.error_message() << "\n";
  google::rpc::Status details;
  google::rpc::BadRequest bad_request;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    if (!detail.UnpackTo(&bad_request)) continue;
    for (const auto& violation : bad_request.field_violations())
      std::cerr << "field " << violation.field() << ": " << violation.description() << "\n";
  }
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::cerr << "usage: client TARGET [BATCH | --bad]\n";
    return 2;
  }
  const std::string option = argc > 2 ? argv[2] : "2";
  const bool bad = option == "--bad";
  const int batch = bad ? 2 : std::stoi(option);

  const Inputs in = RandomInputs(batch);
  const int scale_size = bad ? kChannels - 1 : kChannels;
  pb::FusedBatchNormGradV3Request request;
  *request.mutable_y_backprop() = ToTensor(in.y_backprop, {batch, kHeight, kWidth, kChannels});
  *request.mutable_x() = ToTensor(in.x, {batch, kHeight, kWidth, kChannels});
  *request.mutable_scale() = ToTensor(Floats(in.scale.begin(), in.scale.begin() + scale_size), {scale_size});
  *request.mutable_reserve_space_1() = ToTensor(in.mean, {kChannels});
  *request.mutable_reserve_space_2() = ToTensor(in.variance, {kChannels});
  request.set_epsilon(kEpsilon);

  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // unlimited; the default is 4 MiB
  const auto stub = pb::BatchNormGradService::NewStub(
      grpc::CreateCustomChannel(argv[1], grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  pb::FusedBatchNormGradV3Response response;
  const grpc::Status status = stub->FusedBatchNormGradV3(&context, request, &response);
  if (!status.ok()) {
    PrintError(status);
    return 1;
  }

  const Gradients expected = Expected(in);
  bool good = Matches("x_backprop", response.x_backprop(), expected.x_backprop, 2.4e-7);
  good &= Matches("scale_backprop", response.scale_backprop(), expected.scale_backprop, 1e-6);
  good &= Matches("offset_backprop", response.offset_backprop(), expected.offset_backprop, 1e-6);
  return good ? 0 : 1;
}
