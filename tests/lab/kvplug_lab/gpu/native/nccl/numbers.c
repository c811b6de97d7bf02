#include "numbers.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

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

/* The first bytes of an integer are its lowest, on every machine that the tests run on. */
static double load_float(int type, const char *at) {
    double value;
    float single;
    unsigned bits = 0;
    if (type == FLOAT64) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    if (type == FLOAT32) {
        memcpy(&single, at, sizeof single);
        return single;
    }
    memcpy(&bits, at, bytes_of(type));
    return decode(&smalls[type], bits);
}

static void store_float(int type, char *at, double value) {
    float single = (float)value; /* the small ones, too, by way of a float, as torch rounds */
    if (type == FLOAT64)
        memcpy(at, &value, sizeof value);
    else if (type == FLOAT32)
        memcpy(at, &single, sizeof single);
    else {
        unsigned bits = encode(&smalls[type], single);
        memcpy(at, &bits, bytes_of(type));
    }
}

void sum(int type, void *out, const void *const *in, int ranks, size_t count) {
    size_t nbytes = bytes_of(type);
    for (size_t at = 0; at < count * nbytes; at += nbytes) {
        double value = -0.0; /* to which a -0.0 can be added */
        uint64_t integer = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const char *part = (const char *)in[rank] + at;
            uint64_t addend = 0;
            memcpy(&addend, part, nbytes);
            integer += addend;
            if (type >= FLOAT16)
                value += load_float(type, part);
        }
        if (type >= FLOAT16)
            store_float(type, (char *)out + at, value);
        else
            memcpy((char *)out + at, &integer, nbytes);
    }
}
