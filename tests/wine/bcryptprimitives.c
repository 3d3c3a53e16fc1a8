// bcryptprimitives.dll, which Rust's standard library needs on Windows and wine has only since its version 9: random
// bytes of wine's own generator. For tests; Windows brings the real one.
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID bytes, ULONG count); // RtlGenRandom

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count) { return SystemFunction036(bytes, (ULONG)count); }
