// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//   client localhost:50051          sends a small batch
//   client unix:PATH 2048           sends a batch of 2048 images
//   client localhost:50051 --bad    sends a scale of the wrong length
//   client gpu1.example:50051 --ca ca.pem --token-file alice.token
#include <algorithm>
#include <charconv>
#include <cmath>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bngrad.h"

namespace pb = bngrad::v1;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr int kHeight = 8, kWidth = 8, kChannels = 16;
constexpr float kEpsilon = 1e-3f;
constexpr int kMaxBatch = 100000;

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

bool Matches(const std::string& name, const pb::Tensor& tensor, const Doubles& expected, double tolerance) {
  const Floats values = bngrad::Values(tensor);
  if (values.size() != expected.size()) throw std::runtime_error(name + " has a wrong size");
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
  for (const auto& violation : bngrad::Violations(status))
    std::cerr << "field " << violation.field() << ": " << violation.description() << "\n";
}

int Run(const std::string& target, const bngrad::Options& options, int batch, bool bad) {
  const Inputs in = RandomInputs(batch);
  const int scale_size = bad ? kChannels - 1 : kChannels;
  pb::FusedBatchNormGradV3Request request;
  *request.mutable_y_backprop() = bngrad::ToTensor(in.y_backprop, {batch, kHeight, kWidth, kChannels});
  *request.mutable_x() = bngrad::ToTensor(in.x, {batch, kHeight, kWidth, kChannels});
  *request.mutable_scale() = bngrad::ToTensor(Floats(in.scale.begin(), in.scale.begin() + scale_size), {scale_size});
  *request.mutable_reserve_space_1() = bngrad::ToTensor(in.mean, {kChannels});
  *request.mutable_reserve_space_2() = bngrad::ToTensor(in.variance, {kChannels});
  request.set_epsilon(kEpsilon);

  const bngrad::Client client(target, options);
  pb::FusedBatchNormGradV3Response response;
  const grpc::Status status = client.Call(&bngrad::Client::Stub::FusedBatchNormGradV3, request, &response);
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

int Usage() {
  std::cerr << "usage: client TARGET [BATCH] [--bad] [--ca FILE] [--certificate FILE --key FILE] [--token-file FILE]\n"
            << "BATCH is a whole number from 1 to " << kMaxBatch << "\n";
  return 2;
}

// Returns 0 for a word that is no batch.
int ParseBatch(const std::string& word) {
  int batch = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, batch);
  return error == std::errc() && stop == end && batch > 0 && batch <= kMaxBatch ? batch : 0;
}

int main(int argc, char** argv) {
  std::vector<std::string> words;
  bool bad = false;
  bngrad::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    std::string* path = word == "--ca"            ? &options.ca
                        : word == "--certificate" ? &options.certificate
                        : word == "--key"         ? &options.key
                        : word == "--token-file"  ? &options.token_file
                                                  : nullptr;
    if (path != nullptr && i + 1 < argc) *path = argv[++i];
    else if (word == "--bad") bad = true;
    else if (word.rfind("-", 0) == 0) return Usage();
    else words.push_back(word);
  }
  if (words.empty() || words.size() > 2) return Usage();
  const int batch = words.size() > 1 ? ParseBatch(words[1]) : 2;
  if (batch == 0) return Usage();
  try {
    return Run(words[0], options, batch, bad);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
