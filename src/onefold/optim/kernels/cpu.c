/* One pass over memory per slice on a CPU: gradient, master, compute copy and moments are read once and written once.

The gradient is widened to fp32 and scaled; Adam, AdamW or SGD updates the master in fp32; its 16-bit copy is rounded
from it. The arithmetic is that of torch's own classes on ARM, operation by operation: where torch multiplies and adds
with one rounding, fmaf does, and the compiler may fuse nothing else (compiled.py has the flags). Each operation here
is rounded exactly, so every processor and every compiler gives the same bits; torch's kernels for x86 fuse others.

Elements run in tiles of one size, so that no loop has a remainder; the rest of a slice is copied into a tile and back.
So a result does not depend on where an element stands, on the number of threads or on the width of vectors.

Moments in a small form (codec.py says which) are widened into fp32 moments of the tile, and rounded from them after the
update. There each operation is rounded by itself: the arithmetic of small.py, on every processor. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if !defined(__FP_FAST_FMAF) && !defined(__FMA__) && !defined(__aarch64__)
#error "this processor does not multiply and add with one rounding"
#endif

#define TILE 512 /* elements */
#define BLOCK 16 /* tiles that a thread takes at once */
#define CODED 64 /* elements of 8 bits that share a scale */
#define SPREAD 0x9E3779B1u /* between the random bits of neighbours, before they are mixed */
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

/* cpu.py has the same numbers and fields. */
enum { BF16, FP16, FP32 };                          /* gradients */
enum { SPLIT, WIDE_BF16, WIDE_FP16 };               /* masters: remainders of a bf16 copy, or fp32 beside a copy */
enum { OWN = 3 };                                   /* small forms only: fp32 parameters, which have no copy */
enum { ADAM, ADAM_FUSED, SGD, MOMENTUM, NESTEROV, RULES }; /* torch's fused Adam rounds the second moment elsewhere */
enum { STATE_BF16, STATE_8BIT };                    /* small forms */

typedef struct {
    int32_t grad, master, rule;
    int32_t edits; /* whether a copy that its fp32 master does not round to is a user's edit, which replaces the master */
    float factor; /* of the gradient */
    float decay;  /* of the value, added to the gradient */
    float shrink; /* of the value itself */
    float size;   /* of the step */
    float beta1, rest1, beta2, rest2;
    float root; /* of the second bias correction; with small forms 1 / root */
    float eps;
} Step;

typedef struct {
    const void *grad;
    uint16_t *copy;
    void *master;
    float *first, *second;
} Slice;

typedef struct {
    int32_t form;
    uint32_t key[2], start; /* of random bits; the index of the first element in its parameter */
} Coding;

typedef struct {
    void *moment[2];
    uint8_t *scale[2]; /* with 8 bits: one for each CODED elements */
} Coded;

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

INLINE float one_nan(float value) { /* of two NaNs in a sum, compilers keep either */
    return value == value ? value : float_of(0x7FC00000u);
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

/* Reads `at` and writes `to`, which are the same memory where an update is in place. */
INLINE void run(const int grads, const int masters, const int rule, const int usual, const Step *s, Slice at, Slice to,
                int64_t tiles) {
    for (; tiles > 0; tiles--, at = shifted(s, at, TILE), to = shifted(s, to, TILE)) {
#pragma omp simd
        for (int i = 0; i < TILE; i++) {
            float value = masters == SPLIT ? joined(at.copy[i], ((int16_t *)at.master)[i])
                                           : edited(masters, s, ((float *)at.master)[i], at.copy[i]);
            float grad = widened(grads, at.grad, i) * s->factor;
            float first = rule != SGD ? at.first[i] : 0.0f, second = rule <= ADAM_FUSED ? at.second[i] : 0.0f;
            value = updated(rule, usual, s, value, grad, &first, &second);
            if (rule != SGD)
                to.first[i] = rule <= ADAM_FUSED ? first : one_nan(first);
            if (rule <= ADAM_FUSED)
                to.second[i] = second;
            uint32_t bits = value == value ? bits_of(value) : 0x7FC00000u;
            to.copy[i] = rounded(masters, value);
            if (masters == SPLIT)
                ((int16_t *)to.master)[i] = (int16_t)bits; /* what the copy lacks, up or down */
            else
                ((float *)to.master)[i] = float_of(bits);
        }
    }
}

#define KEY(grads, masters, rule) (((grads) * 3 + (masters)) * RULES + (rule))
#define CASE(grads, masters, rule)                                                                                     \
    case KEY(grads, masters, rule):                                                                                    \
        if (rule <= ADAM_FUSED && usual)                                                                               \
            run(grads, masters, rule, 1, &s, slice, to, tiles);                                                           \
        else                                                                                                           \
            run(grads, masters, rule, 0, &s, slice, to, tiles);                                                           \
        return 0;
#define CASES(grads, masters)                                                                                          \
    CASE(grads, masters, ADAM)                                                                                         \
    CASE(grads, masters, ADAM_FUSED)                                                                                   \
    CASE(grads, masters, SGD)                                                                                          \
    CASE(grads, masters, MOMENTUM)                                                                                     \
    CASE(grads, masters, NESTEROV)

static int run_tiles(const Step *step, Slice slice, Slice to, int64_t tiles) {
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

#ifdef __SSE2__
/* Copies a part of a tile past the caches. */
INLINE void stream(void *to, const void *from, int64_t bytes) {
    if (((uintptr_t)to & 15) != 0) {
        memcpy(to, from, bytes);
        return;
    }
    for (int64_t i = 0; i < bytes / 16; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_load_si128((const __m128i *)from + i));
}

/* As run_tiles, for memory that is only written: a plain store fetches its line first, a third more traffic. */
static void run_elsewhere(const Step *s, Slice slice, Slice to, int64_t tiles) {
    float master[TILE] ALIGNED, first[TILE] ALIGNED, second[TILE] ALIGNED;
    uint16_t copy[TILE] ALIGNED;
    const Slice tile = {slice.grad, copy, master, first, second};
    for (; tiles > 0; tiles--, slice = shifted(s, slice, TILE), to = shifted(s, to, TILE)) {
        run_tiles(s, slice, tile, 1);
        stream(to.copy, copy, sizeof copy);
        stream(to.master, master, TILE * master_bytes(s));
        if (moments(s) > 0)
            stream(to.first, first, sizeof first);
        if (moments(s) > 1)
            stream(to.second, second, sizeof second);
    }
    _mm_sfence();
}
#else /* processors of ARM see by themselves that lines are overwritten whole */
#define run_elsewhere run_tiles
#endif

static void run_rest(const Step *s, Slice slice, Slice to, int64_t count) {
    float grad[TILE] = {0}, master[TILE] = {0}, first[TILE] = {0}, second[TILE] = {0};
    uint16_t copy[TILE] = {0};
    Slice padded = {grad, copy, master, first, second};
    memcpy(grad, slice.grad, count * grad_bytes(s));
    carry(s, padded, slice, count);
    run_tiles(s, padded, padded, 1);
    carry(s, to, padded, count);
}

/* 0, or 1 and nothing done if these dtypes do not go together. What is written goes to `to`; its gradient is not read. */
int onefold_update(const Step *s, const Slice *slice, const Slice *to, int64_t numel, int32_t threads) {
    const int64_t whole = numel / TILE, blocks = (whole + BLOCK - 1) / BLOCK;
    if (run_tiles(s, *slice, *to, 0))
        return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && blocks > 1)
    for (int64_t i = 0; i < blocks; i++) {
        int64_t left = whole - i * BLOCK, at = i * BLOCK * TILE, tiles = left < BLOCK ? left : BLOCK;
        if (slice->master == to->master)
            run_tiles(s, shifted(s, *slice, at), shifted(s, *to, at), tiles);
        else
            run_elsewhere(s, shifted(s, *slice, at), shifted(s, *to, at), tiles);
    }
    if (numel % TILE)
        run_rest(s, shifted(s, *slice, whole * TILE), shifted(s, *to, whole * TILE), numel % TILE);
    return 0;
}

/* -- small forms of moments ---------------------------------------------------------------------------------------- */

INLINE uint32_t random_bits(const Coding *c, uint32_t spread_index) { /* the index of an element times SPREAD */
    uint32_t bits = spread_index + c->key[0];
    bits ^= bits >> 16;
    bits = (bits * 0x21F0AAADu) ^ c->key[1];
    bits ^= bits >> 15;
    bits *= 0x735A2D97u;
    return bits ^ (bits >> 15);
}

INLINE uint16_t to_bf16(float value, uint32_t random) {
    uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFFu, up = size + random;
    up = up < 0x7F7FFFFFu ? up : 0x7F7FFFFFu; /* finite values stay finite */
    size = size < 0x7F800000u ? up : size == 0x7F800000u ? size : 0x7FC00000u;
    return (uint16_t)((size | (bits & 0x80000000u)) >> 16);
}

INLINE uint32_t size_of(float value) {
    uint32_t size = bits_of(value) & 0x7FFFFFFFu;
    return size > 0x7F800000u ? 0x7FC00000u : size < 0x00800000u ? 0u : size;
}

INLINE int least_exponent(const int second) { return second ? 31 : 15; } /* below the scale's */

INLINE void code_block(const int second, const float *restrict values, const uint32_t *restrict random,
                       uint8_t *restrict codes, uint8_t *restrict scale) {
    uint32_t most = 0, least_less_one = UINT32_MAX; /* of all sizes, and of those that are not 0: 0 less one is large */
#pragma omp simd reduction(max : most) reduction(min : least_less_one)
    for (int i = 0; i < CODED; i++) {
        uint32_t size = bits_of(values[i]) & 0x7FFFFFFFu, less_one = size - 1u;
        most = most > size ? most : size;
        least_less_one = least_less_one < less_one ? least_less_one : less_one;
    }
    const int32_t largest = (int32_t)size_of(float_of(most));
    int32_t exponent = (largest + 0x1FFFFF) >> 23, lowest = least_exponent(second) + 1;
    exponent = exponent < lowest ? lowest : exponent > 255 ? 255 : exponent;
    *scale = (uint8_t)exponent;
    const int32_t least = (exponent - least_exponent(second)) << 23; /* the value of code 1, as bits */
    if (least_less_one >= (uint32_t)least - 1u && most < 0x7F000000u) { /* as in most blocks: none below code 1, no overflow */
        const uint32_t zero = (uint32_t)least - (1u << 20); /* where code 0 would be */
#pragma omp simd
        for (int i = 0; i < CODED; i++) {
            uint32_t bits = bits_of(values[i]), size = bits & 0x7FFFFFFFu;
            uint32_t above = size - zero + ((second ? random[i] >> 12 : random[i]) & 0xFFFFFu);
            uint32_t code = size ? above >> 20 : 0u;
            codes[i] = (uint8_t)(second ? code : code | ((bits >> 24) & 0x80u));
        }
        return;
    }
#pragma omp simd
    for (int i = 0; i < CODED; i++) {
        int32_t size = (int32_t)size_of(values[i]), bits = (int32_t)((second ? random[i] >> 12 : random[i]) & 0xFFFFFu);
        int32_t above = size - least, up = above + bits, finite = 0x7F7FFFFF - least;
        up = up < finite ? up : finite;
        above = size < 0x7F800000 ? up : above;
        int32_t shift = (least >> 23) - (size >> 23) + 3;
        shift = shift < 0 ? 0 : shift > 31 ? 31 : shift;
        int32_t chance = ((size & 0x7FFFFF) | 0x800000) >> shift;
        int32_t below = (size > 0) & (second | (chance > bits));
        int32_t code = size >= least ? (above >> 20) + 1 : below;
        codes[i] = (uint8_t)(second ? code : code | (int32_t)((bits_of(values[i]) >> 24) & 0x80u));
    }
}

INLINE void decode_block(const int second, const uint8_t *restrict codes, uint8_t scale, float *restrict values) {
    const uint32_t zero = ((uint32_t)((int32_t)scale - least_exponent(second)) << 23) - (1u << 20);
#pragma omp simd
    for (int i = 0; i < CODED; i++) {
        uint32_t code = codes[i], size = second ? code : code & 0x7Fu;
        uint32_t bits = size ? (size << 20) + zero : 0u;
        values[i] = float_of(second ? bits : bits | ((code & 0x80u) << 24));
    }
}

static void widen(const int form, const int second, const void *moment, const uint8_t *scales, float *values) {
    if (form == STATE_BF16) {
#pragma omp simd
        for (int i = 0; i < TILE; i++)
            values[i] = widened(BF16, moment, i);
        return;
    }
    for (int i = 0; i < TILE / CODED; i++)
        decode_block(second, (const uint8_t *)moment + i * CODED, scales[i], values + i * CODED);
}

static void code(const int form, const int second, const float *values, const uint32_t *random, void *moment,
                 uint8_t *scales) {
    if (form == STATE_BF16) {
#pragma omp simd
        for (int i = 0; i < TILE; i++)
            ((uint16_t *)moment)[i] = to_bf16(values[i], second ? random[i] >> 16 : random[i] & 0xFFFFu);
        return;
    }
    for (int i = 0; i < TILE / CODED; i++)
        code_block(second, values + i * CODED, random + i * CODED, (uint8_t *)moment + i * CODED, scales + i);
}

typedef struct {
    float value[TILE], grad[TILE], moment[2][TILE];
    uint32_t random[TILE];
} Tile;

#define EACH(statement)                                                                                                \
    _Pragma("omp simd") for (int i = 0; i < TILE; i++) { statement; }

static void read_tile(const Step *s, const Slice *at, Tile *t) {
    switch (s->grad) {
        case BF16: EACH(t->grad[i] = widened(BF16, at->grad, i) * s->factor) break;
        case FP16: EACH(t->grad[i] = widened(FP16, at->grad, i) * s->factor) break;
        default: EACH(t->grad[i] = widened(FP32, at->grad, i) * s->factor)
    }
    const float *master = at->master;
    switch (s->master) {
        case SPLIT: EACH(t->value[i] = joined(at->copy[i], ((const int16_t *)at->master)[i])) break;
        case WIDE_BF16: EACH(t->value[i] = edited(WIDE_BF16, s, master[i], at->copy[i])) break;
        case WIDE_FP16: EACH(t->value[i] = edited(WIDE_FP16, s, master[i], at->copy[i])) break;
        default: EACH(t->value[i] = master[i])
    }
}

static void write_tile(const Step *s, const Slice *at, const Tile *t) {
    const float *value = t->value;
    int16_t *remainder = at->master;
    float *master = at->master;
    if (s->master == SPLIT)
        EACH(remainder[i] = (int16_t)(value[i] == value[i] ? bits_of(value[i]) : 0u))
    else
        EACH(master[i] = value[i])
    switch (s->master) {
        case OWN: break;
        case WIDE_FP16: EACH(at->copy[i] = rounded(WIDE_FP16, value[i])) break;
        default: EACH(at->copy[i] = rounded(WIDE_BF16, value[i]))
    }
}

static void update_tile(const Step *s, Tile *t) {
    float *restrict value = t->value, *restrict grad = t->grad;
    float *restrict first = t->moment[0], *restrict second = t->moment[1];
    if (s->decay != 0.0f)
        EACH(grad[i] = grad[i] + value[i] * s->decay)
    if (s->rule == ADAM) {
        EACH(first[i] = first[i] * s->beta1 + grad[i] * s->rest1;
             second[i] = second[i] * s->beta2 + grad[i] * grad[i] * s->rest2;
             value[i] = value[i] * s->shrink - s->size * first[i] / (sqrtf(second[i]) * s->root + s->eps))
        return;
    }
    EACH(first[i] = first[i] * s->beta1 + grad[i])
    if (s->rule == NESTEROV)
        EACH(value[i] = value[i] - s->size * (grad[i] + first[i] * s->beta1))
    else
        EACH(value[i] = value[i] - s->size * first[i])
}

static void small_tile(const Step *s, const Coding *c, Slice slice, const Coded *coded, int64_t at) {
    Tile t;
    const int64_t itemsize = c->form == STATE_BF16 ? 2 : 1;
    read_tile(s, &slice, &t);
    for (int m = 0; m < moments(s); m++)
        widen(c->form, m, (char *)coded->moment[m] + at * itemsize, coded->scale[m] + at / CODED, t.moment[m]);
    update_tile(s, &t);
    write_tile(s, &slice, &t);
    uint32_t spread = (c->start + (uint32_t)at) * SPREAD;
    for (int i = 0; i < TILE; i++, spread += SPREAD)
        t.random[i] = random_bits(c, spread);
    for (int m = 0; m < moments(s); m++)
        code(c->form, m, t.moment[m], t.random, (char *)coded->moment[m] + at * itemsize, coded->scale[m] + at / CODED);
}

INLINE Slice without_moments(const Step *s, Slice slice, int64_t at) {
    slice.grad = (const char *)slice.grad + at * grad_bytes(s);
    slice.copy += s->master == OWN ? 0 : at;
    slice.master = (char *)slice.master + at * master_bytes(s);
    return slice;
}

static void small_rest(const Step *s, const Coding *c, Slice slice, const Coded *coded, int64_t at, int64_t count) {
    float grad[TILE] = {0}, master[TILE] = {0};
    uint16_t copy[TILE] = {0}, moment[2][TILE] = {{0}};
    uint8_t scale[2][TILE / CODED] = {{0}};
    const int64_t itemsize = c->form == STATE_BF16 ? 2 : 1, blocks = (count + CODED - 1) / CODED;
    Slice padded = {grad, copy, master, 0, 0};
    Coded own = {{moment[0], moment[1]}, {scale[0], scale[1]}};
    Coding shifted_by = *c;
    shifted_by.start += (uint32_t)at;
    memcpy(grad, slice.grad, count * grad_bytes(s));
    if (s->master != OWN)
        memcpy(copy, slice.copy, count * sizeof(uint16_t));
    memcpy(master, slice.master, count * master_bytes(s));
    for (int m = 0; m < moments(s); m++) {
        memcpy(moment[m], (char *)coded->moment[m] + at * itemsize, count * itemsize);
        if (c->form == STATE_8BIT)
            memcpy(scale[m], coded->scale[m] + at / CODED, blocks);
    }
    small_tile(s, &shifted_by, padded, &own, 0);
    if (s->master != OWN)
        memcpy(slice.copy, copy, count * sizeof(uint16_t));
    memcpy(slice.master, master, count * master_bytes(s));
    for (int m = 0; m < moments(s); m++) {
        memcpy((char *)coded->moment[m] + at * itemsize, moment[m], count * itemsize);
        if (c->form == STATE_8BIT)
            memcpy(coded->scale[m] + at / CODED, scale[m], blocks);
    }
}

/* As onefold_update, of moments in a small form, with any dtypes; the first element is the first of a block. */
int onefold_update_small(const Step *s, const Coding *c, const Slice *slice, const Coded *coded, int64_t numel,
                         int32_t threads) {
    const int64_t whole = numel / TILE;
    if (s->rule != ADAM && s->rule != MOMENTUM && s->rule != NESTEROV)
        return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && whole > BLOCK)
    for (int64_t i = 0; i < whole; i++)
        small_tile(s, c, without_moments(s, *slice, i * TILE), coded, i * TILE);
    if (numel % TILE)
        small_rest(s, c, without_moments(s, *slice, whole * TILE), coded, whole * TILE, numel % TILE);
    return 0;
}
