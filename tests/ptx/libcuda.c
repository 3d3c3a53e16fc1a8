/* A stand-in for libcuda.so.1: no device, only answers. STANDIN names what goes wrong. Memory is the host's, kernels
   do nothing. Codes are those of cuda.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
static int is(const char *what) {
    const char *s = getenv("STANDIN");
    return s && !strcmp(s, what);
}
R cuInit(unsigned f) { return is("no-device") ? 100 : is("mismatch") ? 803 : 0; }
R cuDriverGetVersion(int *v) { return *v = is("old") ? 10020 : 12080, 0; }
R cuDeviceGetCount(int *n) { return *n = is("hidden") ? 0 : 1, 0; }
R cuDeviceGet(int *d, int i) { return *d = i, i == 0 ? 0 : 101; }
R cuDeviceGetName(char *s, int n, int d) { return snprintf(s, n, "Stand-in"), 0; }
R cuDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:0A:00.0"), 0; }
R cuDeviceTotalMem_v2(size_t *n, int d) { return *n = (size_t)16 << 30, 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { return *v = a == 75 ? 8 : 6, 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { return *c = (void *)1, is("busy") ? 46 : 0; }
R cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuStreamCreate(void **s, unsigned f) { return *s = (void *)2, 0; }
R cuStreamDestroy_v2(void *s) { return 0; }
R cuStreamSynchronize(void *s) { return is("illegal-address") ? 700 : is("lost") ? 719 : 0; }
R cuMemAlloc_v2(unsigned long long *p, size_t n) {
    static int allowed = 1;
    if (is("out-of-memory") && allowed-- <= 0) return 2;
    return *p = (unsigned long long)calloc(1, n), 0;
}
R cuMemFree_v2(unsigned long long p) { return free((void *)p), 0; }
R cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t n, void *s) { return memcpy((void *)to, from, n), 0; }
R cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t n, void *s) { return memcpy(to, (void *)from, n), 0; }
R cuModuleLoadDataEx(void **m, const void *text, unsigned n, int *options, void **values) {
    if (is("compiler")) {
        for (unsigned i = 0; i + 1 < n; i++)
            if (options[i] == 5) snprintf(values[i], (size_t)values[i + 1], "ptxas application ptx input, line 7;\n error");
        return 218;
    }
    return *m = (void *)text, strncmp(text, "//", 2) ? 200 : 0;
}
R cuModuleUnload(void *m) { return 0; }
R cuModuleGetFunction(void **f, void *m, const char *name) { return *f = (void *)3, is("entry") ? 500 : 0; }
R cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared, void *s,
                 void **args, void **extra) {
    return is("launch") ? 701 : x * a == 0;
}
