// The threads of a block, on a CPU: threadIdx, barriers, exchange within a warp, and launch.
#pragma once

#ifndef __x86_64__
#error "the switch of fibers is written for x86-64"
#endif
#define __shared__ static thread_local

struct Index { unsigned x; };

constexpr int kWarpThreads = 32;

[[noreturn]] inline void give_up(const char *why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
}

// What ThreadSanitizer is told: who runs, and what orders whom.
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define UNWATCHED __attribute__((noinline, no_sanitize_thread))
inline void *new_watched() { return __tsan_create_fiber(0); }
inline void forget_watched(void *watched) { __tsan_destroy_fiber(watched); }
inline void *current_watched() { return __tsan_get_current_fiber(); }
inline void watch(void *watched, bool is_ordered) { __tsan_switch_to_fiber(watched, is_ordered ? 0 : 1); }
inline void released(void *address) { __tsan_release(address); }
inline void acquired(void *address) { __tsan_acquire(address); }
#else
#define UNWATCHED
inline void *new_watched() { return nullptr; }
inline void forget_watched(void *) {}
inline void *current_watched() { return nullptr; }
inline void watch(void *, bool) {}
inline void released(void *) {}
inline void acquired(void *) {}
#endif

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

enum class State { kNew, kRunning, kAtWarpBarrier, kAtBlockBarrier, kDone };

struct Fiber {
    void *stack;
    void *watched;
    State state;
    std::uint64_t words[2];
    int exchanges, barriers;
};

class Block {
   public:
    Block(int threads, const std::function<void()> &kernel)
        : kernel_(kernel), threads_(threads), fibers_(new Fiber[threads]), stacks_(new char[threads * kStackNbytes]) {
        for (unsigned t = 0; t < threads_; ++t) fibers_[t].watched = new_watched();
        watched_ = current_watched();
    }
    Block(const Block &) = delete;
    ~Block() {
        for (unsigned t = 0; t < threads_; ++t) forget_watched(fibers_[t].watched);
        delete[] fibers_;
        delete[] stacks_;
    }

    void run();
    void wait(State state);
    void barrier();
    std::uint64_t exchange(std::uint64_t word, int mask);
    unsigned thread() const { return thread_; }

   private:
    static constexpr std::size_t kStackNbytes = 64 << 10;

    static void begin();
    void enter(unsigned thread);
    unsigned run_warp(unsigned first);

    const std::function<void()> &kernel_;
    unsigned threads_;
    Fiber *fibers_;
    char *stacks_;
    void *scheduler_ = nullptr, *watched_;
    unsigned thread_ = 0;
    char barriers_[2];  // only their addresses matter
};

inline thread_local Block *block = nullptr;
#define threadIdx (Index{block->thread()})

inline void __syncthreads() { block->barrier(); }
inline std::uint64_t exchange(std::uint64_t word, int mask) { return block->exchange(word, mask); }

UNWATCHED inline void Block::wait(State state) {
    Fiber &fiber = fibers_[thread_];
    fiber.state = state;
    watch(watched_, state == State::kDone);
    switch_stack(&fiber.stack, scheduler_);
}

// By turns one of two: who has left the one may be at the next before others have left it.
UNWATCHED inline void Block::barrier() {
    Fiber &fiber = fibers_[thread_];
    char *const barrier = &barriers_[fiber.barriers++ & 1];
    released(barrier);
    wait(State::kAtBlockBarrier);
    acquired(barrier);
}

UNWATCHED inline std::uint64_t Block::exchange(std::uint64_t word, int mask) {
    Fiber &own = fibers_[thread_], &other = fibers_[thread_ ^ mask];
    const int turn = own.exchanges++ & 1;  // a thread may be one exchange ahead of another, never two
    own.words[turn] = word;
    wait(State::kAtWarpBarrier);
    return other.words[turn];
}

UNWATCHED inline void Block::begin() {
    block->kernel_();
    block->wait(State::kDone);
}

UNWATCHED inline void Block::enter(unsigned thread) {
    Fiber &fiber = fibers_[thread];
    const bool is_new = fiber.state == State::kNew;
    fiber.state = State::kRunning;
    thread_ = thread;
    watch(fiber.watched, is_new);
    switch_stack(&scheduler_, fiber.stack);
}

// Runs a warp until each of its threads is at a barrier of the block, or done. Returns how many are done.
UNWATCHED inline unsigned Block::run_warp(unsigned first) {
    for (;;) {
        unsigned waiting = 0, done = 0;
        for (unsigned t = first; t < first + kWarpThreads; ++t) {
            const State state = fibers_[t].state;
            if (state == State::kNew || state == State::kRunning) enter(t);
            waiting += fibers_[t].state == State::kAtWarpBarrier;
            done += fibers_[t].state == State::kDone;
        }
        if (!waiting) return done;
        if (waiting != kWarpThreads) give_up("not all threads of a warp take part in a shuffle");
        for (unsigned t = first; t < first + kWarpThreads; ++t) fibers_[t].state = State::kRunning;
    }
}

UNWATCHED inline void Block::run() {
    block = this;
    for (unsigned t = 0; t < threads_; ++t) {
        // As switch_stack leaves a stack: six registers, and where to return to; aligned as if it had been called.
        void **top = reinterpret_cast<void **>(stacks_ + (t + 1) * kStackNbytes);
        top -= reinterpret_cast<std::uintptr_t>(top) / sizeof(void *) % 2;
        top[-2] = reinterpret_cast<void *>(&Block::begin);
        fibers_[t] = {top - 8, fibers_[t].watched, State::kNew, {}, 0, 0};
    }
    for (;;) {
        unsigned done = 0;
        for (unsigned t = 0; t < threads_; t += kWarpThreads) done += run_warp(t);
        if (done == threads_) return;
        if (done) give_up("not all threads of a block reach a __syncthreads");
        for (unsigned t = 0; t < threads_; ++t) fibers_[t].state = State::kRunning;
    }
}

inline thread_local std::vector<uint4> *dynamic = nullptr;

inline void launch(int blocks, int threads, std::size_t shared_nbytes, int os_threads,
                   const std::function<void()> &kernel) {
    std::atomic<int> next{0};
    std::barrier<> begin(os_threads);  // on a busy machine the first would have done it all before the next is there
    std::vector<std::thread> all;
    for (int i = 0; i < os_threads; ++i) {
        all.emplace_back([&] {
            Block own(threads, kernel);
            begin.arrive_and_wait();
            while (next++ < blocks) {
                std::vector<uint4> memory(shared_nbytes / sizeof(uint4), {~0u, ~0u, ~0u, ~0u});  // NaN
                dynamic = &memory;
                own.run();
            }
        });
    }
    for (std::thread &thread : all) thread.join();
}

namespace bngrad {

inline uint4 *dynamic_shared() { return dynamic->data(); }

}  // namespace bngrad
