"""The numerics contract written again, naively: numpy, loops over blocks, casts of ml_dtypes.

Shares no code with fp4jax and works in another order; only numpy's float32 arithmetic and the
float8 and float4 casts of ml_dtypes are common ground.
"""

import ml_dtypes
import numpy as np

FLT_MAX = np.finfo(np.float32).max
# The 16 signs of TransformerEngine's fixed vector, mask 0xD7E8: bit i set means -1.
SIGNS = np.array([-1.0 if 0xD7E8 >> i & 1 else 1.0 for i in range(16)])


def sylvester(size):
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def e2m1(y):
    """Nearest-even by comparing with all points, from the definition of the grid."""
    points = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    a = min(abs(float(y)), 6.0)
    distance = np.abs(points - a)
    best = np.flatnonzero(distance == distance.min())
    code = best[best % 2 == 0][0] if len(best) == 2 else best[0]
    return int(code), points[code]


def nvfp4(x, tile=(1, 16)):
    """Blocks along the last axis of a matrix: (codes [M, K], scales, tensor_scale, values)."""
    x = np.asarray(x, np.float32)
    rows, columns = x.shape
    height, width = tile
    grid = (-(-rows // height), -(-columns // width))
    f32 = np.float32
    with np.errstate(all="ignore"):
        amax = np.max(np.abs(x[np.isfinite(x)]), initial=f32(0))
        S = min(f32(2688) / amax, FLT_MAX)
        codes = np.zeros(x.shape, np.uint8)
        values = np.zeros(x.shape, np.float32)
        scales = np.zeros(grid, ml_dtypes.float8_e4m3fn)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                b = np.max(np.abs(x[block]))
                if not np.isfinite(b):
                    scales[i, j] = np.nan
                    values[block] = np.nan
                    continue
                s = np.clip(b * (S * f32(1 / 6)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
                scales[i, j] = s
                e = min(f32(1) / (f32(s) * (f32(1) / S)), FLT_MAX)
                for index in np.ndindex(x[block].shape):
                    v = x[block][index]
                    code, value = e2m1(v * e)
                    codes[block][index] = code | (8 if np.signbit(v) else 0)
                    values[block][index] = np.copysign(f32(value) * f32(s), v)
        return codes, scales, f32(1) / S, values


def packed(codes):
    """Two codes a byte, the even index in the low nibble; an odd length ends with a zero."""
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return codes[..., ::2] | codes[..., 1::2] << 4


def rotated(x, axis=-1, signs=SIGNS):
    """The random Hadamard transform in float64, zeros appended to whole groups."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % len(signs))])
    groups = x.reshape(*x.shape[:-1], -1, len(signs))
    y = groups @ (np.diag(signs) @ sylvester(len(signs)))
    return np.moveaxis(y.reshape(x.shape), -1, axis)


def integers(shape, seed, axis):
    """Small integers times a power of two that varies along ``axis``: they rotate exactly."""
    rng = np.random.default_rng(seed)
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return np.float32(rng.integers(-8, 9, shape) * 2.0 ** rng.integers(-9, 4, sizes))


def decoded(x, tile=(1, 16)):
    """What a matrix becomes in NVFP4, float64."""
    _, _, tensor, values = nvfp4(x, tile)
    return np.float64(values) * np.float64(tensor)


def nearest_products(x, w, dy):
    """Fprop, Dgrad and Wgrad of the paper's recipe with nearest rounding throughout, float64.

    Also the same with all terms positive, for error bounds.
    """
    qw = decoded(w.T, (16, 16)).T
    x_turned, dy_turned = (decoded(rotated(a.T)) for a in (x, dy))
    pairs = [(decoded(x), qw), (decoded(dy), qw.T), (x_turned, dy_turned.T)]
    return [a @ b for a, b in pairs], [np.abs(a) @ np.abs(b) for a, b in pairs]
