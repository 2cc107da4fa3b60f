// Loops that the compiler turns into vector code for the processor they run on.
#pragma once

// Compiles a function for several instruction sets; the best one is chosen when the program is loaded. Functions that
// it calls must be inline. Sanitizers do not support this, and clang 14 does not support it on templates.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MD_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MD_VECTORIZED
#endif
