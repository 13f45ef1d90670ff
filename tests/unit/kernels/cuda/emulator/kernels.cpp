// The kernels, compiled for a CPU, behind one function for ctypes.
#include "cuda_on_cpu.hpp"

#include "batch_norm_grad.cu"

#include <map>
#include <string>

#define KERNELS(dtype)                                                                                         \
    {#dtype "_training_resident", dtype##_training_resident},                                                  \
    {#dtype "_training_vectors", dtype##_training_vectors}, {#dtype "_training_elements", dtype##_training_elements}, \
    {#dtype "_inference_vectors", dtype##_inference_vectors}, {#dtype "_inference_elements", dtype##_inference_elements}

static const std::map<std::string, decltype(&float32_training_vectors)> kKernels = {
    KERNELS(float32), KERNELS(float16), KERNELS(bfloat16)};

extern "C" void launch_kernel(const char *name, const bngrad::Descriptor *descriptors, const bngrad::Ticket *tickets,
                              unsigned count, unsigned *drawn, std::size_t shared_nbytes, int blocks,
                              int os_threads) {
    const auto kernel = kKernels.at(name);
    launch(blocks, bngrad::kThreads, shared_nbytes, os_threads, [=] { kernel(descriptors, tickets, count, drawn); });
}

// So that the layouts of tables.py can be compared with the compiler's.
extern "C" std::size_t descriptor_nbytes() { return sizeof(bngrad::Descriptor); }
extern "C" std::size_t ticket_nbytes() { return sizeof(bngrad::Ticket); }
