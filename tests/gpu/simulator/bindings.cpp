// What Python needs of GPGPU-Sim beside the CUDA functions that it has: kernels from a file of PTX, by name.
#include <map>
#include <string>

#include "cuda_api_object.h"
#include "gpgpu_context.h"
#include "src/cuda-sim/ptx_ir.h"
#include "src/cuda-sim/ptx_parser.h"

CUctx_st *GPGPUSim_Context(gpgpu_context *context);

namespace {

constexpr unsigned kBinary = 1;
std::map<std::string, int> static_shared;

CUctx_st &cuda() { return *GPGPUSim_Context(GPGPU_Context()); }

}  // namespace

extern "C" {

// Loads the PTX of one file; how many registers and how much memory it takes is what ptxas says of the other one.
void simulator_load(const char *ptx, const char *resources, unsigned arch) {
    gpgpu_context *const context = GPGPU_Context();
    gpgpu_t *const gpu = cuda().get_device()->get_gpgpu();  // reads the configuration, so it comes first
    symbol_table *const symbols = context->gpgpu_ptx_sim_load_ptx_from_filename(ptx);
    context->api->name_symtab[ptx] = symbols;
    cuda().add_binary(symbols, kBinary);
    context->api->load_static_globals(symbols, STATIC_ALLOC_LIMIT, 0xffffffff, gpu);
    context->api->load_constants(symbols, STATIC_ALLOC_LIMIT, gpu);
    context->gpgpu_ptx_info_load_from_filename(resources, arch);
}

// What cuLaunchKernel knows a kernel by, once it is told how much shared memory the next launch adds.
const void *simulator_kernel(const char *name, int dynamic_shared) {
    const auto known = static_shared.emplace(name, 0);
    const char *const key = known.first->first.c_str();
    if (known.second) cuda().register_function(kBinary, key, name);
    function_info *const kernel = cuda().get_kernel(key);
    gpgpu_ptx_sim_info resources = *kernel->get_kernel_info();
    if (known.second) known.first->second = resources.smem;
    resources.smem = known.first->second + dynamic_shared;
    kernel->set_kernel_info(resources);
    return key;
}
}
