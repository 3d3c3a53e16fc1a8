/* Quantises numbers on stdin (f32) to blocks of a K type on stdout, with ggml's reference quantisers. make.py compiles
 * it with ggml-quants.c and -ffp-contract=off, because fused multiply-adds give other bits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "ggml-quants.h"

/* required by the linker, never called */
size_t ggml_type_size(enum ggml_type t) { (void)t; abort(); }
size_t ggml_row_size(enum ggml_type t, int64_t n) { (void)t; (void)n; abort(); }
void ggml_abort(const char *file, int line, const char *fmt, ...) { (void)file; (void)line; (void)fmt; abort(); }
const char *ggml_type_name(enum ggml_type t) { (void)t; abort(); }

int main(int argc, char **argv) {
    static float x[1 << 20];
    static char y[1 << 22];
    size_t n = fread(x, sizeof(float), 1 << 20, stdin);
    if (argc != 2 || n % 256) return 2;
    switch (atoi(argv[1])) {
        case 2: quantize_row_q2_K_ref(x, (block_q2_K *)y, n); return fwrite(y, sizeof(block_q2_K), n / 256, stdout) != n / 256;
        case 3: quantize_row_q3_K_ref(x, (block_q3_K *)y, n); return fwrite(y, sizeof(block_q3_K), n / 256, stdout) != n / 256;
        case 4: quantize_row_q4_K_ref(x, (block_q4_K *)y, n); return fwrite(y, sizeof(block_q4_K), n / 256, stdout) != n / 256;
        case 5: quantize_row_q5_K_ref(x, (block_q5_K *)y, n); return fwrite(y, sizeof(block_q5_K), n / 256, stdout) != n / 256;
        case 6: quantize_row_q6_K_ref(x, (block_q6_K *)y, n); return fwrite(y, sizeof(block_q6_K), n / 256, stdout) != n / 256;
    }
    return 2;
}
