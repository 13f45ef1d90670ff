// The kernels, compiled for a CPU, behind one function for ctypes.
#include "cuda_on_cpu.hpp"

#include "batch_norm_grad.cu"

extern "C" void launch_kernel(decltype(&first_float32_training_vectors) kernel, const bngrad::Descriptor *descriptors,
                              const bngrad::WorkTile *work_tiles, unsigned tile_count, unsigned *tile_counter,
                              std::size_t shared_nbytes, int blocks, int os_threads) {
    launch(blocks, bngrad::kThreads, shared_nbytes, os_threads,
           [=] { kernel(descriptors, work_tiles, tile_count, tile_counter); });
}

// For comparing the layouts of descriptors.py with the compiler's.
extern "C" std::size_t descriptor_nbytes() { return sizeof(bngrad::Descriptor); }
extern "C" std::size_t work_tile_nbytes() { return sizeof(bngrad::WorkTile); }
