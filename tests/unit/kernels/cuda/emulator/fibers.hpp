// The threads of a block, on a CPU: threadIdx, barriers, exchange within a warp, and launch.
#pragma once

struct Index { unsigned x; };

constexpr int kWarpThreads = 32;

[[noreturn]] inline void give_up(const char *why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
}

#ifdef ONE_OS_THREAD_PER_CUDA_THREAD

#include <barrier>
#define __shared__ static

struct Block {
    explicit Block(int threads) : barrier(threads), words(threads) {
        for (int i = 0; i < threads / kWarpThreads; ++i) warps.push_back(std::make_unique<std::barrier<>>(kWarpThreads));
    }
    std::barrier<> barrier;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::vector<std::uint64_t> words;
};
inline Block *block = nullptr;
inline thread_local Index threadIdx;

inline void __syncthreads() { block->barrier.arrive_and_wait(); }

inline std::uint64_t exchange(std::uint64_t word, int mask) {
    std::barrier<> &warp = *block->warps[threadIdx.x / kWarpThreads];
    block->words[threadIdx.x] = word;
    warp.arrive_and_wait();
    const std::uint64_t received = block->words[threadIdx.x ^ mask];
    warp.arrive_and_wait();
    return received;
}

inline std::vector<uint4> *dynamic = nullptr;

inline void launch(int blocks, int threads, std::size_t shared_nbytes, int, const std::function<void()> &kernel) {
    for (int i = 0; i < blocks; ++i) {
        Block running(threads);
        std::vector<uint4> memory(shared_nbytes / sizeof(uint4));
        dynamic = &memory;
        block = &running;
        std::vector<std::thread> all;
        for (unsigned t = 0; t < unsigned(threads); ++t) {
            all.emplace_back([t, &kernel] {
                threadIdx = {t};
                kernel();
            });
        }
        for (std::thread &thread : all) thread.join();
    }
}

#else

#ifndef __x86_64__
#error "the switch of fibers is written for x86-64"
#endif
#define __shared__ static thread_local

// Keeps the registers that a call keeps, and goes on where the other stack was left.
extern "C" void switch_stack(void **left, void *entered);
asm(R"(
.text
.globl switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

enum class State { kRunning, kAtWarpBarrier, kAtBlockBarrier, kDone };

struct Fiber {
    void *stack;
    State state;
    std::uint64_t words[2];
    int exchanges;
};

class Block {
   public:
    Block(int threads, const std::function<void()> &kernel)
        : kernel_(kernel), fibers_(threads), stacks_(new char[threads * kStackNbytes]) {}

    void run();
    void wait(State state) {
        Fiber &fiber = fibers_[thread_];
        fiber.state = state;
        switch_stack(&fiber.stack, scheduler_);
    }
    std::uint64_t exchange(std::uint64_t word, int mask) {
        Fiber &own = fibers_[thread_], &other = fibers_[thread_ ^ mask];
        const int turn = own.exchanges++ & 1;  // a thread may be one exchange ahead of another, never two
        own.words[turn] = word;
        wait(State::kAtWarpBarrier);
        return other.words[turn];
    }
    unsigned thread() const { return thread_; }

   private:
    static constexpr std::size_t kStackNbytes = 32 << 10;

    static void begin();
    void enter(unsigned thread);
    int run_warp(unsigned first);

    const std::function<void()> &kernel_;
    std::vector<Fiber> fibers_;
    std::unique_ptr<char[]> stacks_;
    void *scheduler_ = nullptr;
    unsigned thread_ = 0;
};

inline thread_local Block *block = nullptr;
#define threadIdx (Index{block->thread()})

inline void __syncthreads() { block->wait(State::kAtBlockBarrier); }
inline std::uint64_t exchange(std::uint64_t word, int mask) { return block->exchange(word, mask); }

inline void Block::begin() {
    block->kernel_();
    block->wait(State::kDone);
}

inline void Block::enter(unsigned thread) {
    thread_ = thread;
    switch_stack(&scheduler_, fibers_[thread].stack);
}

// Runs a warp until each of its threads is at a barrier of the block, or done. Returns how many are done.
inline int Block::run_warp(unsigned first) {
    for (;;) {
        int waiting = 0, done = 0;
        for (unsigned t = first; t < first + kWarpThreads; ++t) {
            if (fibers_[t].state == State::kRunning) enter(t);
            waiting += fibers_[t].state == State::kAtWarpBarrier;
            done += fibers_[t].state == State::kDone;
        }
        if (!waiting) return done;
        if (waiting != kWarpThreads) give_up("not all threads of a warp take part in a shuffle");
        for (unsigned t = first; t < first + kWarpThreads; ++t) fibers_[t].state = State::kRunning;
    }
}

inline void Block::run() {
    block = this;
    for (unsigned t = 0; t < fibers_.size(); ++t) {
        // As switch_stack leaves a stack: six registers, and where to return to; aligned as if it had been called.
        void **top = reinterpret_cast<void **>(&stacks_[(t + 1) * kStackNbytes]);
        top -= reinterpret_cast<std::uintptr_t>(top) / sizeof(void *) % 2;
        top[-2] = reinterpret_cast<void *>(&Block::begin);
        fibers_[t] = {top - 8, State::kRunning, {}, 0};
    }
    for (;;) {
        std::size_t done = 0;
        for (unsigned t = 0; t < fibers_.size(); t += kWarpThreads) done += run_warp(t);
        if (done == fibers_.size()) return;
        if (done) give_up("not all threads of a block reach a __syncthreads");
        for (Fiber &fiber : fibers_) fiber.state = State::kRunning;
    }
}

inline thread_local std::vector<uint4> *dynamic = nullptr;

inline void launch(int blocks, int threads, std::size_t shared_nbytes, int os_threads,
                   const std::function<void()> &kernel) {
    std::atomic<int> next{0};
    std::vector<std::thread> all;
    for (int i = 0; i < os_threads; ++i) {
        all.emplace_back([&] {
            Block own(threads, kernel);
            std::vector<uint4> memory(shared_nbytes / sizeof(uint4));
            dynamic = &memory;
            while (next++ < blocks) own.run();
        });
    }
    for (std::thread &thread : all) thread.join();
}

#endif

namespace bngrad {

inline uint4 *dynamic_shared() { return dynamic->data(); }

}  // namespace bngrad
