#include "numbers.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { SUM, PROD, MAX, MIN, AVG };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };

size_t bytes_of(int type) {
    static const unsigned char sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

/* The floats that C has no type for. `top` is the largest finite one; what follows it is infinity, or all that
 * there is beyond it is one NaN (the 8-bit one with four bits of exponent). */
static const struct small {
    int exponent, mantissa, bias;
    unsigned top;
} smalls[TYPES] = {
    [FLOAT16] = {5, 10, 15, 0x7bff},
    [BFLOAT16] = {8, 7, 127, 0x7f7f},
    [FLOAT8E4M3] = {4, 3, 7, 0x7e},
    [FLOAT8E5M2] = {5, 2, 15, 0x7b},
};

static double decode(const struct small *small, unsigned bits) {
    unsigned sign = 1u << (small->exponent + small->mantissa);
    unsigned rest = bits & (sign - 1), mantissa = rest & ((1u << small->mantissa) - 1);
    int exponent = (int)(rest >> small->mantissa);
    double value;
    if (rest > small->top)
        value = small->exponent != 4 && rest == small->top + 1 ? INFINITY : NAN;
    else if (exponent == 0)
        value = ldexp(mantissa, 1 - small->bias - small->mantissa);
    else
        value = ldexp(mantissa + (1u << small->mantissa), exponent - small->bias - small->mantissa);
    return bits & sign ? -value : value;
}

static unsigned encode(const struct small *small, double value) {
    unsigned sign = signbit(value) ? 1u << (small->exponent + small->mantissa) : 0;
    double size = fabs(value);
    if (isnan(size))
        return sign | (sign ? sign - 1 : (1u << (small->exponent + small->mantissa)) - 1);
    if (size == 0)
        return sign;
    if (isinf(size))
        return sign | (small->top + 1);
    int exponent = ilogb(size);
    if (exponent < 1 - small->bias)
        exponent = 1 - small->bias;
    /* To the nearest, ties to even. One that is rounded up to the next power of two carries into the exponent. */
    double scaled = nearbyint(ldexp(size, small->mantissa - exponent));
    double bits = ldexp(exponent + small->bias - 1, small->mantissa) + scaled;
    return sign | (bits > small->top ? small->top + 1 : (unsigned)bits);
}

static double load_float(int type, const char *at) {
    union {
        float f;
        double d;
        uint16_t two;
        uint8_t one;
    } u;
    memcpy(&u, at, bytes_of(type));
    if (type == FLOAT64)
        return u.d;
    if (type == FLOAT32)
        return u.f;
    return decode(&smalls[type], bytes_of(type) == 2 ? u.two : u.one);
}

static void store_float(int type, char *at, double value) {
    float single = (float)value;
    if (type == FLOAT64)
        memcpy(at, &value, sizeof value);
    else if (type == FLOAT32)
        memcpy(at, &single, sizeof single);
    else {
        uint16_t two = (uint16_t)encode(&smalls[type], single); /* by way of a float, as torch rounds */
        uint8_t one = (uint8_t)two;
        if (bytes_of(type) == 2)
            memcpy(at, &two, sizeof two);
        else
            memcpy(at, &one, sizeof one);
    }
}

static double combine_floats(int op, double a, double b) {
    switch (op) {
    case PROD:
        return a * b;
    case MAX:
        return fmax(a, b);
    case MIN:
        return fmin(a, b);
    default:
        return a + b;
    }
}

/* All integers are 64 bits wide here, with their sign: what wraps there wraps here. */
static uint64_t load_integer(int type, const char *at) {
    uint64_t value = 0;
    size_t nbytes = bytes_of(type);
    memcpy(&value, at, nbytes);
    bool negative = type % 2 == 0 && nbytes < 8 && value >> (8 * nbytes - 1);
    return negative ? value | ~UINT64_C(0) << (8 * nbytes) : value;
}

static uint64_t combine_integers(int type, int op, uint64_t a, uint64_t b) {
    bool less = type % 2 == 0 ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case PROD:
        return a * b;
    case MAX:
        return less ? b : a;
    case MIN:
        return less ? a : b;
    default:
        return a + b;
    }
}

void reduce(int type, int op, void *out, const void *const *in, int ranks, size_t count) {
    size_t nbytes = bytes_of(type);
    for (size_t at = 0; at < count * nbytes; at += nbytes) {
        char *to = (char *)out + at;
        if (type >= FLOAT16) {
            double value = load_float(type, (const char *)in[0] + at);
            for (int rank = 1; rank < ranks; rank++)
                value = combine_floats(op, value, load_float(type, (const char *)in[rank] + at));
            store_float(type, to, op == AVG ? value / ranks : value);
        } else {
            uint64_t value = load_integer(type, (const char *)in[0] + at);
            for (int rank = 1; rank < ranks; rank++)
                value = combine_integers(type, op, value, load_integer(type, (const char *)in[rank] + at));
            if (op == AVG)
                value = type % 2 == 0 ? (uint64_t)((int64_t)value / ranks) : value / (uint64_t)ranks;
            memcpy(to, &value, nbytes);
        }
    }
}
