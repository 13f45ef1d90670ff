// The kernels, compiled for a CPU, behind one function for ctypes.
#include "cuda_on_cpu.hpp"

#include "batch_norm_grad.cu"

#include <map>
#include <string>

#define KERNEL(name) {#name, name}
#define STREAMED(name) KERNEL(name##_vectors), KERNEL(name##_elements)
#define KERNELS(dtype)                                                                              \
    KERNEL(first_##dtype##_training_resident),                                                      \
    STREAMED(first_##dtype##_training), STREAMED(first_##dtype##_inference),                        \
    STREAMED(second_##dtype##_training), STREAMED(second_##dtype##_inference)

static const std::map<std::string, decltype(&first_float32_training_vectors)> kKernels = {
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
