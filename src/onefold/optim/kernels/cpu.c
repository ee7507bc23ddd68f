/* One pass over memory per slice on a CPU: gradient, master, compute copy and moments are read once and written once.

The gradient is widened to fp32 and scaled; Adam, AdamW or SGD updates the master in fp32; its 16-bit copy is rounded
from it. The arithmetic is that of torch's own classes on ARM, operation by operation: where torch multiplies and adds
with one rounding, fmaf does, and the compiler may fuse nothing else (compiled.py has the flags). Each operation here
is rounded exactly, so every processor and every compiler gives the same bits; torch's kernels for x86 fuse others.

Elements run in tiles of one size, so that no loop has a remainder; the rest of a slice is copied into a tile and back.
So a result does not depend on where an element stands, on the number of threads or on the width of vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__FP_FAST_FMAF) && !defined(__FMA__) && !defined(__aarch64__)
#error "this processor does not multiply and add with one rounding"
#endif

#define TILE 512 /* elements */
#define BLOCK 16 /* tiles that a thread takes at once */
#define INLINE static inline __attribute__((always_inline))

/* cpu.py has the same numbers and fields. */
enum { BF16, FP16, FP32 };                          /* gradients */
enum { SPLIT, WIDE_BF16, WIDE_FP16 };               /* masters: remainders of a bf16 copy, or fp32 beside a copy */
enum { ADAM, ADAM_FUSED, SGD, MOMENTUM, NESTEROV, RULES }; /* torch's fused Adam rounds the second moment elsewhere */

typedef struct {
    int32_t grad, master, rule;
    int32_t edits; /* whether a copy that its fp32 master does not round to is a user's edit, which replaces the master */
    float factor; /* of the gradient */
    float decay;  /* of the value, added to the gradient */
    float shrink; /* of the value itself */
    float size;   /* of the step */
    float beta1, rest1, beta2, rest2, root, eps;
} Step;

typedef struct {
    const void *grad;
    uint16_t *copy;
    void *master;
    float *first, *second;
} Slice;

/* -- bits -------------------------------------------------------------------------------------------------------- */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_half(uint16_t half) {
    uint32_t size = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t tiny = -(uint32_t)(size < 0x0400u), large = -(uint32_t)(size >= 0x7C00u); /* subnormal; infinite or NaN */
    uint32_t bits = (size << 13) + 0x38000000u + (tiny & 0x00800000u) + (large & 0x38000000u);
    return float_of(sign | bits_of(float_of(bits) - float_of(tiny & 0x38800000u))); /* a subnormal had no leading 1 */
}

INLINE uint16_t to_half(float value) { /* to the nearest, ties to even: by a sum whose last bit is worth the half's */
    uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
    size = size < 0x47800000u ? size : 0x47800000u; /* 65536 and more become infinity */
    uint32_t exponent = size & 0x7F800000u;
    exponent = exponent > 0x38800000u ? exponent : 0x38800000u; /* subnormals have that of the smallest normal */
    uint32_t magic = exponent + 0x06800000u;
    uint32_t units = bits_of(float_of(size) + float_of(magic)) - magic;
    uint32_t half = sign | (((exponent - 0x38800000u) >> 13) + units);
    return (uint16_t)(value == value ? half : 0x7E00u);
}

INLINE float widened(const int dtype, const void *restrict from, int i) {
    if (dtype == FP32)
        return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return dtype == BF16 ? float_of((uint32_t)bits << 16) : from_half(bits);
}

INLINE float joined(uint16_t copy, int16_t remainder) {
    uint32_t upper = (uint32_t)copy << 16;
    float value = float_of(upper + (uint32_t)(int32_t)remainder);
    return value == value ? value : float_of(upper); /* a copy set to 0 by hand, where a remainder means nothing */
}

INLINE uint16_t rounded(const int masters, float value) { /* NaNs: a carry would reach the sign */
    uint32_t bits = value == value ? bits_of(value) : 0x7FC00000u;
    return masters == WIDE_FP16 ? to_half(float_of(bits)) : (uint16_t)((bits + 0x8000u) >> 16);
}

INLINE float edited(const int masters, const Step *s, float value, uint16_t copy) {
    int kept = !s->edits | (rounded(masters, value) == copy);
    return kept ? value : masters == WIDE_FP16 ? from_half(copy) : float_of((uint32_t)copy << 16);
}

/* -- rules ------------------------------------------------------------------------------------------------------- */

/* `usual`: nothing is added to the gradient, and the first moment keeps more than it takes. Constant like the rule, so
   that the loop has no choice left. */
INLINE float updated(const int rule, const int usual, const Step *s, float value, float grad, float *first,
                     float *second) {
    if (!usual && s->decay != 0.0f)
        grad = fmaf(s->decay, value, grad);
    if (rule == ADAM || rule == ADAM_FUSED) {
        int near = usual || s->rest1 < 0.5f; /* torch interpolates from the nearer end */
        *first = fmaf(near ? s->rest1 : s->rest1 - 1.0f, grad - *first, near ? *first : grad);
        if (rule == ADAM)
            *second = fmaf(s->rest2 * grad, grad, s->beta2 * *second);
        else
            *second = fmaf(s->beta2, *second, s->rest2 * grad * grad);
        return value * s->shrink + -s->size * *first / (sqrtf(*second) / s->root + s->eps);
    }
    if (rule != SGD) {
        *first = s->beta1 * *first + grad;
        grad = rule == NESTEROV ? fmaf(s->beta1, *first, grad) : *first;
    }
    return fmaf(-s->size, grad, value);
}

/* -- slices ------------------------------------------------------------------------------------------------------ */

INLINE int64_t grad_bytes(const Step *s) { return s->grad == FP32 ? 4 : 2; }
INLINE int64_t master_bytes(const Step *s) { return s->master == SPLIT ? 2 : 4; }
INLINE int moments(const Step *s) { return s->rule <= ADAM_FUSED ? 2 : s->rule == SGD ? 0 : 1; }

INLINE Slice shifted(const Step *s, Slice slice, int64_t at) {
    slice.grad = (const char *)slice.grad + at * grad_bytes(s);
    slice.copy += at;
    slice.master = (char *)slice.master + at * master_bytes(s);
    slice.first += moments(s) > 0 ? at : 0;
    slice.second += moments(s) > 1 ? at : 0;
    return slice;
}

INLINE void run(const int grads, const int masters, const int rule, const int usual, const Step *s, Slice at,
                int64_t tiles) {
    for (; tiles > 0; tiles--, at = shifted(s, at, TILE)) {
#pragma omp simd
        for (int i = 0; i < TILE; i++) {
            float value = masters == SPLIT ? joined(at.copy[i], ((int16_t *)at.master)[i])
                                           : edited(masters, s, ((float *)at.master)[i], at.copy[i]);
            float grad = widened(grads, at.grad, i) * s->factor;
            value = updated(rule, usual, s, value, grad, at.first + i, at.second + i);
            uint32_t bits = value == value ? bits_of(value) : 0x7FC00000u;
            at.copy[i] = rounded(masters, value);
            if (masters == SPLIT)
                ((int16_t *)at.master)[i] = (int16_t)bits; /* what the copy lacks, up or down */
            else
                ((float *)at.master)[i] = float_of(bits);
        }
    }
}

#define KEY(grads, masters, rule) (((grads) * 3 + (masters)) * RULES + (rule))
#define CASE(grads, masters, rule)                                                                                     \
    case KEY(grads, masters, rule):                                                                                    \
        if (rule <= ADAM_FUSED && usual)                                                                               \
            run(grads, masters, rule, 1, &s, slice, tiles);                                                            \
        else                                                                                                           \
            run(grads, masters, rule, 0, &s, slice, tiles);                                                            \
        return 0;
#define CASES(grads, masters)                                                                                          \
    CASE(grads, masters, ADAM)                                                                                         \
    CASE(grads, masters, ADAM_FUSED)                                                                                   \
    CASE(grads, masters, SGD)                                                                                          \
    CASE(grads, masters, MOMENTUM)                                                                                     \
    CASE(grads, masters, NESTEROV)

static int run_tiles(const Step *step, Slice slice, int64_t tiles) {
    const Step s = *step; /* of our own: nothing that is written below can change it */
    const int usual = s.decay == 0.0f && s.rest1 < 0.5f;
    switch (KEY(s.grad, s.master, s.rule)) {
        CASES(BF16, SPLIT)
        CASES(BF16, WIDE_BF16)
        CASES(FP16, WIDE_FP16)
        CASES(FP32, SPLIT)
        CASES(FP32, WIDE_BF16)
        CASES(FP32, WIDE_FP16)
    }
    return 1;
}

static void carry(const Step *s, Slice to, Slice from, int64_t count) {
    memcpy(to.copy, from.copy, count * sizeof(uint16_t));
    memcpy(to.master, from.master, count * master_bytes(s));
    if (moments(s) > 0)
        memcpy(to.first, from.first, count * sizeof(float));
    if (moments(s) > 1)
        memcpy(to.second, from.second, count * sizeof(float));
}

static void run_rest(const Step *s, Slice slice, int64_t count) {
    float grad[TILE] = {0}, master[TILE] = {0}, first[TILE] = {0}, second[TILE] = {0};
    uint16_t copy[TILE] = {0};
    Slice padded = {grad, copy, master, first, second};
    memcpy(grad, slice.grad, count * grad_bytes(s));
    carry(s, padded, slice, count);
    run_tiles(s, padded, 1);
    carry(s, slice, padded, count);
}

/* 0, or 1 and nothing done if these dtypes do not go together. */
int onefold_update(const Step *s, const Slice *slice, int64_t numel, int32_t threads) {
    const int64_t whole = numel / TILE, blocks = (whole + BLOCK - 1) / BLOCK;
    if (run_tiles(s, *slice, 0))
        return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && blocks > 1)
    for (int64_t i = 0; i < blocks; i++) {
        int64_t left = whole - i * BLOCK;
        run_tiles(s, shifted(s, *slice, i * BLOCK * TILE), left < BLOCK ? left : BLOCK);
    }
    if (numel % TILE)
        run_rest(s, shifted(s, *slice, whole * TILE), numel % TILE);
    return 0;
}
