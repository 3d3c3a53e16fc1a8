/* A stand-in for libcuda.so.1: no device, only answers. STANDIN names what goes wrong. Memory is the host's, kernels
   do nothing. Codes are those of cuda.h. It keeps books: what is used without a current context, given back twice or
   never, or used after its context is gone, ends the process with exit code 99. So does every wait of the driver itself,
   and every call that frees after the device failed or while it does not answer. Copies, kernels and events of a stream
   are done one at a time, when the program asks whether they are done. Where STANDIN_LOG names a file, every module,
   kernel and upload is written there, in the order of the stream; addresses are the same in every process. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long P;
static int is(const char *what) {
    const char *s = getenv("STANDIN");
    return s && !strcmp(s, what);
}

/* Things that are given back: memory, pinned memory, streams, modules, events, graphs, graphs that can be started. */
enum { MEMORY, PINNED, STREAM, MODULE, EVENT, GRAPH, EXEC, KINDS };
static struct { void *at; int kind; size_t bytes; } things[4096];
static int retained, dead, listening, fallen, failed, silent, first_kernel;
static __thread void *current;

static void wrong(const char *what) {
    fprintf(stderr, "misuse of the driver: %s\n", what);
    _exit(99);
}
static void at_exit(void) {
    if (retained && !failed && !silent) wrong("a context that is never released");
}
static void needs_context(const char *call) {
    if (!retained) wrong("a call without a context");
    if (!current) wrong(call);
}
/* A device has a thread; those of several devices keep the same books. */
static int held;
static void hold(void) {
    while (__sync_lock_test_and_set(&held, 1)) usleep(1);
}
static void *let_go(void *what) { return __sync_lock_release(&held), what; }
static void *have(void *at, int kind) {
    hold();
    for (int i = 0; i < 4096; i++)
        if (!things[i].at) return things[i].kind = kind, things[i].bytes = 0, things[i].at = at, let_go(at);
    wrong("more things than the books hold");
    return 0;
}
static int find(void *at, int kind) {
    for (int i = 0; i < 4096; i++)
        if (things[i].at == at && things[i].kind == kind) return i;
    wrong("something that is not there: given back twice, or never had");
    return 0;
}
/* Work of streams that is not done yet. */
static void finish(void);
/* An error that every later call returns. */
static R sticky(R code) { return failed = 1, code; }
static R gone(void *at, int kind, const char *call) {
    needs_context(call);
    if (failed || silent) wrong("something is given back after the device failed, or does not answer");
    finish();
    things[find(at, kind)].at = 0;
    if (kind == PINNED) free(at);
    return 0;
}
static void say(const char *line) {
    const char *path = getenv("STANDIN_LOG");
    FILE *f = path ? fopen(path, "a") : 0;
    if (!f) return;
    fprintf(f, "%s\n", line);
    fclose(f);
}
/* Memory is taken upwards, and never twice. */
static void *room(size_t n) {
    static char *next, *end;
    size_t all = (size_t)64 << 30;
    hold();
    if (!next) {
        next = mmap((void *)0x200000000000, all, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (next == MAP_FAILED) wrong("no room for memory");
        end = next + all;
    }
    n = (n + 511) / 512 * 512;
    if (n > (size_t)(end - next)) return let_go(0);
    next += n;
    return let_go(next - n);
}
/* The n bytes from address are inside one allocation. */
static void inside(P address, size_t n) {
    for (int i = 0; i < 4096; i++) {
        P at = (P)things[i].at;
        if (at && things[i].kind == MEMORY && at <= address && address + n <= at + things[i].bytes) return;
    }
    wrong("an address that was never had");
}

R cuInit(unsigned f) {
    if (!listening++) atexit(at_exit);
    return is("no-device") ? 100 : is("mismatch") ? 803 : is("stub") ? 34 : 0;
}
R cuDriverGetVersion(int *v) { return *v = is("old") ? 10020 : is("graphs-old") || is("hopper-old") ? 11080 : 12080, 0; }
R cuDeviceGetCount(int *n) { return *n = is("hidden") ? 0 : is("one-broken") || is("two") ? 2 : 1, 0; }
R cuDeviceGet(int *d, int i) { return *d = i, i == 0 || is("one-broken") || is("two") ? 0 : 101; }
R cuDeviceGetName(char *s, int n, int d) { return snprintf(s, n, "Stand-in"), (d == 1 && !is("two")) || is("broken") ? 999 : 0; }
R cuDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:0%c:00.0", 'A' + d), 0; }
R cuDeviceTotalMem_v2(size_t *n, int d) { return *n = (size_t)16 << 30, 0; }
static int hopper(void) { return getenv("STANDIN") && !strncmp(getenv("STANDIN"), "hopper", 6); }
/* 16: multiprocessors; 18: integrated; 75 and 76: compute capability. */
R cuDeviceGetAttribute(int *v, int a, int d) {
    if (a == 18) return *v = is("jetson"), 0;
    if (a == 16) return *v = 132, 0;
    if (hopper()) return *v = a == 75 ? 9 : 0, 0;
    if (is("turing")) return *v = a == 75 ? 7 : 5, 0;
    if (is("volta") || is("volta-compiler")) return *v = a == 75 ? 7 : 0, 0;
    return *v = a == 75 ? (is("pascal") ? 6 : 8) : (is("pascal") ? 1 : 6), 0;
}
R cuDevicePrimaryCtxSetFlags_v2(int d, unsigned flags) { return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) {
    if (is("busy")) return 46;
    return *c = (void *)1, __sync_fetch_and_add(&retained, 1), 0;
}
R cuDevicePrimaryCtxRelease_v2(int d) {
    if (!retained) wrong("a context that is released twice");
    if (failed || silent) wrong("a context is released after the device failed, or does not answer");
    if (__sync_sub_and_fetch(&retained, 1)) return 0;
    for (int i = 0; i < 4096; i++)
        if (things[i].at) wrong("something that is not given back with its context");
    return 0;
}
R cuCtxSetCurrent(void *c) {
    if (c && !retained) wrong("a context that is not retained");
    if (dead || is("context")) return dead ? sticky(719) : 201;
    return current = c, 0;
}
R cuCtxGetCurrent(void **c) { return *c = current, 0; }
R cuStreamCreate(void **s, unsigned f) {
    needs_context("cuStreamCreate");
    if (is("stream")) return 304;
    return *s = have(calloc(1, 8), STREAM), 0;
}
R cuStreamDestroy_v2(void *s) { return gone(s, STREAM, "cuStreamDestroy"); }
R cuStreamSynchronize(void *s) { return wrong("a wait without a deadline"), 0; }
R cuEventSynchronize(void *e) { return wrong("a wait without a deadline"), 0; }

/* What a stream does, in order: a copy, a line of the record, an event. */
struct op { void *stream, *event; void *to; const void *from; size_t n; int upload; char *line; };
static struct op *ops;
static int first, last, busy, ahead;
static void lock(void) { while (__sync_lock_test_and_set(&busy, 1)) usleep(1); }
static void unlock(void) { __sync_lock_release(&busy); }
/* The queue of a real driver has about 1,024 places. */
static void submit(void) {
    if (++ahead > 1000) wrong("a call that blocks until the device has done earlier work");
}
static void queue(struct op op) {
    lock();
    if (!ops) ops = calloc(1 << 20, sizeof *ops);
    if (last == 1 << 20) wrong("more work than the stand-in queues");
    ops[last++] = op, unlock();
}
/* Does the oldest work of any stream. */
static void step(void) {
    struct op *op = &ops[first];
    if (op->upload) {
        P sum = 0;
        char line[99];
        for (size_t i = 0; getenv("STANDIN_LOG") && i < op->n; i++) sum = sum * 31 + ((unsigned char *)op->from)[i];
        snprintf(line, sizeof line, "upload %llx %zu %llx", (P)op->to, op->n, sum), say(line);
    }
    if (op->n) memcpy(op->to, op->from, op->n);
    if (op->line) say(op->line), free(op->line);
    if (++first == last) first = last = 0;
}
static void finish(void) {
    for (lock(); first < last;) step();
    unlock();
}
/* 600, and one piece of work, while there is some of this stream or before this event. */
static R done(void *stream, void *event) {
    ahead = 0;
    if (silent) return 600;
    lock();
    for (int i = first; i < last; i++)
        if (stream ? ops[i].stream == stream : ops[i].event == event) return step(), unlock(), 600;
    return unlock(), 0;
}
R cuStreamQuery(void *s) {
    needs_context("cuStreamQuery");
    find(s, STREAM);
    R code = done(s, 0);
    if (code) return code;
    if (is("gone") && first_kernel) dead = 1;
    if (!first_kernel) return 0;
    return is("illegal-address") || fallen ? sticky(700) : is("lost") || dead ? sticky(719) : 0;
}
R cuEventQuery(void *e) { return needs_context("cuEventQuery"), find(e, EVENT), done(0, e); }
R cuEventCreate(void **e, unsigned f) {
    if (needs_context("cuEventCreate"), f != 3) wrong("an event whose wait spins, or that takes times");
    return *e = have(calloc(1, 8), EVENT), 0;
}
R cuEventRecord(void *e, void *s) {
    needs_context("cuEventRecord"), find(e, EVENT), find(s, STREAM);
    return queue((struct op){.stream = s, .event = e}), 0;
}
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
    for (int i = 0; is("graphs-fill-it") && i < 4096; i++)
        if (things[i].at && things[i].kind == EXEC) return 2;
    void *at = room(n);
    if (!at) return 2;
    *p = (P)have(at, MEMORY);
    return things[find(at, MEMORY)].bytes = n, 0;
}
R cuMemGetInfo_v2(size_t *free, size_t *total) {
    needs_context("cuMemGetInfo");
    return *total = (size_t)16 << 30, *free = is("full") ? 100 << 20 : (size_t)15 << 30, 0;
}
R cuMemFree_v2(P p) { return gone((void *)p, MEMORY, "cuMemFree"); }
R cuMemcpyHtoDAsync_v2(P to, const void *from, size_t n, void *s) {
    needs_context("cuMemcpyHtoDAsync");
    inside(to, n);
    find(s, STREAM);
    if (is("upload")) return sticky(700);
    submit();
    return queue((struct op){.stream = s, .to = (void *)to, .from = from, .n = n, .upload = 1}), 0;
}
R cuMemcpyDtoHAsync_v2(void *to, P from, size_t n, void *s) {
    needs_context("cuMemcpyDtoHAsync");
    inside(from, n);
    find(s, STREAM);
    submit();
    return queue((struct op){.stream = s, .to = to, .from = (void *)from, .n = n}), 0;
}

/* A tensor map as it is here: what it was made of, and the sum of that. */
struct map { P sum, at, cols, rows, stride, box, rest[10]; };
static P sum_of(struct map *m) { return 77 + m->at * 3 + m->cols * 5 + m->rows * 7 + m->stride * 11 + m->box * 13; }

/* An entry: its name and the bytes of its parameters. */
struct function { int magic, n, size[64]; unsigned shared; char name[64]; };
/* A kernel and what it works on. */
struct node { struct graph *graph; struct function *f; unsigned grid[3], threads; P values[64]; struct map maps[4]; };
struct graph { int n; struct node *nodes[1 << 14]; };
struct started { struct graph *from; int n; struct node *nodes; };
/* As in cuda.h. */
struct params {
    void *f; unsigned grid[3], block[3], shared; void **args, **extra; void *kernel, *context;
};

static R take(struct node *node, struct function *f, const unsigned *grid, const unsigned *block, unsigned shared,
              void **args) {
    if (!f || f->magic != 77) wrong("a function that is none");
    if (grid[0] * block[0] == 0 || grid[1] > 65535 || grid[2] > 65535) return 1;
    node->f = f, node->threads = block[0];
    memcpy(node->grid, grid, sizeof node->grid);
    if (shared != f->shared || (shared && (shared <= 49152 || block[0] != (strstr(f->name, "_wide_") ? 128 : 384) || (strncmp(f->name, "attention", 9) && grid[0] > 132))))
        wrong("a launch without its shared memory, threads or grid");
    for (int i = 0, maps = 0; i < f->n; i++) {
        node->values[i] = 0;
        if (f->size[i] != 128) {
            memcpy(&node->values[i], args[i], f->size[i]);
            continue;
        }
        struct map *map = &node->maps[maps++ & 3];
        if (memcpy(map, args[i], 128), map->sum != sum_of(map)) wrong("an argument that is no tensor map");
    }
    return 0;
}
static int of_sm90a(struct node *node) { return !!strstr(node->f->name, "sm90a"); }
static void run(struct node *node, void *stream) {
    char line[2048];
    int at = snprintf(line, sizeof line, "%s %u %u %u x %u:", node->f->name, node->grid[0], node->grid[1], node->grid[2],
                      node->threads);
    for (int i = 0, maps = 0; i < node->f->n; i++) {
        struct map *m = &node->maps[maps & 3];
        int map = node->f->size[i] == 128 && ++maps;
        at += map ? snprintf(line + at, sizeof line - at, " [%llx,%llu,%llu,%llu,%llu]", m->at, m->rows, m->cols, m->stride, m->box)
                  : snprintf(line + at, sizeof line - at, " %llx", node->values[i]);
    }
    first_kernel = 1;
    queue((struct op){.stream = stream, .line = strdup(line)});
    if (is("silent") || (of_sm90a(node) && is("hopper-silent"))) silent = 1;
    if (of_sm90a(node) && is("hopper-fault")) fallen = 1;
    if (of_sm90a(node) && is("hopper-crash")) abort();
    if (of_sm90a(node) && is("hopper-blocks")) pause();
    if (of_sm90a(node) && is("hopper-term")) raise(SIGTERM);
}

R cuModuleLoadDataEx(void **m, const void *text, unsigned n, int *options, void **values) {
    needs_context("cuModuleLoadDataEx");
    if (is("compiler") || (is("volta-compiler") && !strncmp(text, "// product_sm70:", 16))) {
        for (unsigned i = 0; i + 1 < n; i++)
            if (options[i] == 5) snprintf(values[i], (size_t)values[i + 1], "ptxas application ptx input, line 7;\n error");
        return 218;
    }
    if (strncmp(text, "//", 2)) return 200;
    char line[99];
    snprintf(line, sizeof line, "# module %.*s", (int)strcspn(text, ":\n"), (const char *)text);
    say(line);
    return *m = have(strdup(text), MODULE), 0;
}
R cuModuleUnload(void *m) { return gone(m, MODULE, "cuModuleUnload"); }
R cuModuleGetFunction(void **out, void *m, const char *name) {
    needs_context("cuModuleGetFunction");
    find(m, MODULE);
    if (is("entry")) return 500;
    char entry[99];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    const char *at = strstr(m, entry);
    if (!at) return 500;
    struct function *f = calloc(1, sizeof *f);
    snprintf(f->name, sizeof f->name, "%s", name);
    for (const char *end = strchr(at, ')'); (at = strstr(at + 1, ".param .")) && at < end;)
        f->size[f->n++] = strncmp(at, ".param .align", 13) ? strtol(strpbrk(at + 7, "0123456789"), 0, 10) / 8 : 128;
    return f->magic = 77, *out = f, 0;
}
/* Shared memory beyond 48 KiB is asked for before it is used: 8 is how much a launch may give. */
R cuFuncSetAttribute(struct function *f, int attribute, int value) {
    needs_context("cuFuncSetAttribute");
    if (attribute != 8 || f->magic != 77) wrong("an attribute of a function");
    return is("hopper-attribute") ? 1 : (f->shared = value, 0);
}
/* 4: registers of a thread. */
R cuFuncGetAttribute(int *value, int attribute, struct function *f) {
    needs_context("cuFuncGetAttribute");
    if (attribute != 4 || f->magic != 77) wrong("an attribute of a function");
    return *value = is("hopper-registers") ? 160 : 168, is("hopper-unknown") ? 1 : 0;
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
    inside((P)at, strides[0] * (sizes[1] - 1) + 2 * sizes[0]);
    struct map made = {0, (P)at, sizes[0], sizes[1], strides[0], box[1]};
    made.sum = sum_of(&made);
    return memcpy(map, &made, 128), 0;
}
#endif
R cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared, void *s,
                 void **args, void **extra) {
    struct node node;
    unsigned grid[3] = {x, y, z}, block[3] = {a, b, c};
    needs_context("cuLaunchKernel");
    find(s, STREAM);
    if (is("launch") || fallen) return fallen ? sticky(700) : 701;
    R code = take(&node, f, grid, block, shared, args);
    return code ? code : (submit(), run(&node, s), 0);
}

#ifndef NO_GRAPHS
R cuGraphCreate(void **g, unsigned flags) {
    needs_context("cuGraphCreate");
    if (is("graph-create")) return 2;
    return *g = have(calloc(1, sizeof(struct graph)), GRAPH), 0;
}
/* In a chain: each behind the one that was added before it. */
R cuGraphAddKernelNode_v2(void **out, void *g, void **before, size_t n, struct params *p) {
    needs_context("cuGraphAddKernelNode");
    find(g, GRAPH);
    struct graph *graph = g;
    if (n != (graph->n > 0) || (n && before[0] != graph->nodes[graph->n - 1])) wrong("a node that is not behind the last one");
    if (is("graph-node") && graph->n == 3) return 801;
    struct node *node = calloc(1, sizeof *node);
    node->graph = graph;
    graph->nodes[graph->n++] = node;
    return *out = node, p->extra || p->kernel ? 1 : take(node, p->f, p->grid, p->block, p->shared, p->args);
}
R cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long flags) {
    static int made;
    needs_context("cuGraphInstantiate");
    find(g, GRAPH);
    if (is("graph-instantiate")) return 2;
    struct graph *graph = g;
    struct started *it = calloc(1, sizeof *it);
    *it = (struct started){graph, graph->n, calloc(graph->n, sizeof(struct node))};
    for (int i = 0; i < it->n; i++) it->nodes[i] = *graph->nodes[i];
    *e = have(it, EXEC);
    int alive = 0;
    for (int i = 0; i < 4096; i++) alive += things[i].at && things[i].kind == EXEC;
    char line[99];
    snprintf(line, sizeof line, "# made %d, %d alive", ++made, alive);
    return say(line), 0;
}
R cuGraphExecKernelNodeSetParams_v2(void *e, void *node, struct params *p) {
    needs_context("cuGraphExecKernelNodeSetParams");
    find(e, EXEC);
    struct started *it = e;
    find(it->from, GRAPH);
    if (is("graph-params") || fallen) return fallen ? sticky(700) : 910;
    for (int i = 0; i < it->n; i++) {
        struct node *changed = &it->nodes[i];
        struct map before = changed->maps[0];
        if (it->from->nodes[i] != node) continue;
        R code = take(changed, p->f, p->grid, p->block, p->shared, p->args);
        /* As if a node kept what its first map was. */
        if (is("hopper-stale")) changed->maps[0] = before;
        return code;
    }
    wrong("a node of another graph");
    return 1;
}
R cuGraphLaunch(void *e, void *s) {
    needs_context("cuGraphLaunch");
    find(e, EXEC), find(s, STREAM);
    if (is("graph-launch") || fallen) return fallen ? sticky(700) : 801;
    struct started *it = e;
    fallen = is("graph-fault");
    submit();
    queue((struct op){.stream = s, .line = strdup("# graph")});
    for (int i = 0; i < it->n; i++) run(&it->nodes[i], s);
    return 0;
}
R cuGraphExecDestroy(void *e) { return gone(e, EXEC, "cuGraphExecDestroy"); }
R cuGraphDestroy(void *g) { return gone(g, GRAPH, "cuGraphDestroy"); }
#endif
