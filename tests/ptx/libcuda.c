/* A stand-in for libcuda.so.1: no device, only answers. STANDIN names what goes wrong. Memory is the host's, kernels
   do nothing. Codes are those of cuda.h. It keeps books: what is used without a current context, given back twice or
   never, or used after its context is gone, ends the process with exit code 99. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long P;
static int is(const char *what) {
    const char *s = getenv("STANDIN");
    return s && !strcmp(s, what);
}

/* Things that are given back: memory, pinned memory, streams, modules, events. */
enum { MEMORY, PINNED, STREAM, MODULE, EVENT, KINDS };
static struct { void *at; int kind; } things[4096];
static int retained, dead, listening;
static __thread void *current;

static void wrong(const char *what) {
    fprintf(stderr, "misuse of the driver: %s\n", what);
    _exit(99);
}
static void at_exit(void) {
    if (retained) wrong("a context that is never released");
}
static void needs_context(const char *call) {
    if (!retained) wrong("a call without a context");
    if (!current) wrong(call);
}
static void *have(void *at, int kind) {
    for (int i = 0; i < 4096; i++)
        if (!things[i].at) return things[i].at = at, things[i].kind = kind, at;
    wrong("more things than the books hold");
    return 0;
}
static int find(void *at, int kind) {
    for (int i = 0; i < 4096; i++)
        if (things[i].at == at && things[i].kind == kind) return i;
    wrong("something that is not there: given back twice, or never had");
    return 0;
}
static R gone(void *at, int kind, const char *call) {
    needs_context(call);
    things[find(at, kind)].at = 0;
    if (kind == MEMORY || kind == PINNED) free(at);
    return dead ? 719 : 0;
}
/* An address lies in something that is allocated. */
static void inside(P address) {
    P below = 0;
    for (int i = 0; i < 4096; i++)
        if (things[i].at && things[i].kind == MEMORY && (P)things[i].at <= address && (P)things[i].at > below)
            below = (P)things[i].at;
    if (!below) wrong("an address that was never had");
}

R cuInit(unsigned f) {
    if (!listening++) atexit(at_exit);
    return is("no-device") ? 100 : is("mismatch") ? 803 : 0;
}
R cuDriverGetVersion(int *v) { return *v = is("old") ? 10020 : is("hopper-old") ? 11080 : 12080, 0; }
R cuDeviceGetCount(int *n) { return *n = is("hidden") ? 0 : is("one-broken") ? 2 : 1, 0; }
R cuDeviceGet(int *d, int i) { return *d = i, i == 0 || is("one-broken") ? 0 : 101; }
R cuDeviceGetName(char *s, int n, int d) { return snprintf(s, n, "Stand-in"), d == 1 || is("broken") ? 999 : 0; }
R cuDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:0A:00.0"), 0; }
R cuDeviceTotalMem_v2(size_t *n, int d) { return *n = (size_t)16 << 30, 0; }
static int hopper(void) { return getenv("STANDIN") && !strncmp(getenv("STANDIN"), "hopper", 6); }
/* 16: multiprocessors; 18: integrated; 75 and 76: compute capability. */
R cuDeviceGetAttribute(int *v, int a, int d) {
    if (a == 18) return *v = is("jetson"), 0;
    if (a == 16) return *v = 132, 0;
    if (hopper()) return *v = a == 75 ? 9 : 0, 0;
    return *v = a == 75 ? (is("pascal") ? 6 : 8) : (is("pascal") ? 1 : 6), 0;
}
R cuDevicePrimaryCtxSetFlags_v2(int d, unsigned flags) { return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) {
    if (is("busy")) return 46;
    return *c = (void *)1, retained++, 0;
}
R cuDevicePrimaryCtxRelease_v2(int d) {
    if (!retained) wrong("a context that is released twice");
    if (--retained || dead) return 0;
    for (int i = 0; i < 4096; i++)
        if (things[i].at) wrong("something that is not given back with its context");
    return 0;
}
R cuCtxSetCurrent(void *c) {
    if (c && !retained) wrong("a context that is not retained");
    if (dead || is("context")) return dead ? 719 : 201;
    return current = c, 0;
}
R cuCtxGetCurrent(void **c) { return *c = current, 0; }
R cuStreamCreate(void **s, unsigned f) {
    needs_context("cuStreamCreate");
    if (is("stream")) return 304;
    return *s = have(calloc(1, 8), STREAM), 0;
}
R cuStreamDestroy_v2(void *s) { return gone(s, STREAM, "cuStreamDestroy"); }
R cuStreamSynchronize(void *s) {
    needs_context("cuStreamSynchronize");
    find(s, STREAM);
    if (is("gone")) dead = 1;
    return is("illegal-address") ? 700 : is("lost") || dead ? 719 : 0;
}
R cuEventCreate(void **e, unsigned f) { return needs_context("cuEventCreate"), *e = have(calloc(1, 8), EVENT), 0; }
R cuEventRecord(void *e, void *s) { return needs_context("cuEventRecord"), find(e, EVENT), find(s, STREAM), 0; }
R cuEventSynchronize(void *e) { return needs_context("cuEventSynchronize"), find(e, EVENT), 0; }
R cuEventDestroy_v2(void *e) { return gone(e, EVENT, "cuEventDestroy"); }
R cuMemHostAlloc(void **p, size_t n, unsigned f) {
    needs_context("cuMemHostAlloc");
    if (is("pinned")) return 2;
    return *p = have(calloc(1, n), PINNED), 0;
}
R cuMemFreeHost(void *p) { return gone(p, PINNED, "cuMemFreeHost"); }
R cuMemAlloc_v2(P *p, size_t n) {
    static int allowed = 1;
    needs_context("cuMemAlloc");
    if (is("out-of-memory") && allowed-- <= 0) return 2;
    return *p = (P)have(calloc(1, n), MEMORY), 0;
}
R cuMemGetInfo_v2(size_t *free, size_t *total) {
    needs_context("cuMemGetInfo");
    return *total = (size_t)16 << 30, *free = is("full") ? 100 << 20 : (size_t)15 << 30, 0;
}
R cuMemFree_v2(P p) { return gone((void *)p, MEMORY, "cuMemFree"); }
R cuMemcpyHtoDAsync_v2(P to, const void *from, size_t n, void *s) {
    needs_context("cuMemcpyHtoDAsync");
    inside(to);
    if (is("upload")) return 700;
    return memcpy((void *)to, from, n), 0;
}
R cuMemcpyDtoHAsync_v2(void *to, P from, size_t n, void *s) {
    needs_context("cuMemcpyDtoHAsync");
    inside(from);
    return memcpy(to, (void *)from, n), 0;
}
R cuModuleLoadDataEx(void **m, const void *text, unsigned n, int *options, void **values) {
    needs_context("cuModuleLoadDataEx");
    if (is("compiler")) {
        for (unsigned i = 0; i + 1 < n; i++)
            if (options[i] == 5) snprintf(values[i], (size_t)values[i + 1], "ptxas application ptx input, line 7;\n error");
        return 218;
    }
    if (strncmp(text, "//", 2)) return 200;
    return *m = have(calloc(1, 8), MODULE), 0;
}
R cuModuleUnload(void *m) { return gone(m, MODULE, "cuModuleUnload"); }
R cuModuleGetFunction(void **f, void *m, const char *name) {
    needs_context("cuModuleGetFunction");
    find(m, MODULE);
    return *f = (void *)(strstr(name, "_sm90a_") ? strstr(name, "lora") ? 5 : 4 : 3), is("entry") ? 500 : 0;
}
/* Shared memory beyond 48 KiB is asked for before it is used: 8 is how much a launch may give. */
static int allowed_shared[8];
R cuFuncSetAttribute(void *f, int attribute, int value) {
    needs_context("cuFuncSetAttribute");
    if (attribute != 8 || (size_t)f < 4) wrong("an attribute of a function");
    return is("hopper-attribute") ? 1 : (allowed_shared[(size_t)f] = value, 0);
}
#ifndef WITHOUT_MAPS
/* bf16, two dimensions, boxes of 64 columns, the swizzle of 128 bytes, zero beyond. */
R cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *at, const unsigned long long *sizes,
                         const unsigned long long *strides, const unsigned *box, const unsigned *steps, int interleave,
                         int swizzle, int promotion, int fill) {
    if ((size_t)map % 64 || type != 9 || rank != 2 || (size_t)at % 16 || strides[0] % 16 || strides[0] < 2 * sizes[0] ||
        box[0] != 64 || box[1] == 0 || box[1] > 256 || steps[0] != 1 || steps[1] != 1 || interleave || swizzle != 3 || fill)
        wrong("a tensor map that no driver takes");
    if (is("hopper-maps")) return 801;
    inside((P)at);
    return memset(map, 90, 128), 0;
}
#endif
R cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared, void *s,
                 void **args, void **extra) {
    needs_context("cuLaunchKernel");
    find(s, STREAM);
    if ((size_t)f >= 4) {
        static const char whole[128] = {[0 ... 127] = 90};
        if (shared != (unsigned)allowed_shared[(size_t)f] || shared < 196608 || a != 384 || x > 132)
            wrong("a launch of sm_90a without its shared memory, threads or grid");
        if (memcmp(args[1], whole, 128) || memcmp(args[2], whole, 128)) wrong("arguments that are no tensor maps");
    } else if (shared)
        wrong("shared memory that nobody asked for");
    return is("launch") ? 701 : x * a == 0 || y > 65535 || z > 65535;
}
