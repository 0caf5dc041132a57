# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Formats and rounding
#
# A 4-bit number can have 16 values. A neural network computes with millions of different ones.
# This notebook shows how the second kind is squeezed into the first, and what is lost.
#
# You need to know NumPy and what a matrix product is. You need to know nothing about low precision.
#
# 1. The sixteen numbers
# 2. Scales: one block, step by step
# 3. Why there is a tensor scale
# 4. Square tiles for weights
# 5. A transform against outliers
# 6. Every format on the tensors of a real, small model

# %%
import dataclasses
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import Markdown, display

import fp4jax as fp4
from fp4jax.diagnostics import damage

plt.rcParams.update({"figure.dpi": 64, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9})


def table(header, rows):
    """Shows rows of strings as a table."""
    lines = [header, ["---"] * len(header), *rows]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))


# %% [markdown]
# ## 1. The sixteen numbers
#
# The format's name is E2M1: one sign bit, two exponent bits, one mantissa bit.
# These are all its numbers.

# %%
e2m1 = np.arange(16, dtype=np.uint8).view(fp4.formats.E2M1.dtype).astype(np.float32)
table(
    ["sign 0: bits", "number", "sign 1: bits", "number"],
    [[f"{i:04b}", f"{e2m1[i]:g}", f"{i + 8:04b}", f"{e2m1[i + 8]:g}"] for i in range(8)],
)

# %% [markdown]
# There are two zeros, so 15 different numbers. The gaps grow with the numbers: ½, then 1, then 2.
# A float keeps a *relative* precision. An integer format (INT4) keeps an *absolute* one.
#
# Rounding to nearest sends each real number to the closest of these.
# Exactly in the middle, the neighbour whose last bit is 0 wins ("ties to even").

# %%
ticks = np.linspace(-8, 8, 1601, dtype=np.float32)
rounded = ticks.astype(fp4.formats.E2M1.dtype).astype(np.float32)

figure, (line, stairs) = plt.subplots(2, 1, figsize=(6, 4.6), height_ratios=[1, 4])
for y, name, points in [(1, "E2M1", e2m1), (0, "INT4", np.arange(-7, 8) * 6 / 7)]:
    line.plot(points, np.full(len(points), y), "o", label=name)
line.set_yticks([0, 1], ["INT4 · 6/7", "E2M1"])
line.set_ylim(-0.6, 1.6)
line.set_xlabel("number (no unit)")
stairs.plot(ticks, ticks, color="0.7", label="no rounding")
stairs.plot(ticks, rounded, label="nearest E2M1")
stairs.set_xlabel("number before rounding (no unit)")
stairs.set_ylabel("number after rounding (no unit)")
stairs.legend()
plt.show()

# %% [markdown]
# **What to see.** Above: E2M1's points crowd around zero; INT4's, shrunk to the same range, do not.
# Below: the steps are wide where numbers are large. Beyond ±6 the stairs end: larger numbers are
# cut off to 6 (they *saturate*). Between −¼ and ¼ everything becomes 0 (it *underflows*).

# %% [markdown]
# ## 2. Scales: one block, step by step
#
# Real tensors do not live between −6 and 6. So each number is first multiplied by something.
# NVFP4 (arXiv 2509.25149) does it in two levels:
#
# * every **block** of 16 neighbours has a scale, itself only an 8-bit float (E4M3, at most 448);
# * the whole **tensor** has one more scale, a 32-bit float.
#
# Here are two blocks: one with a maximum of 40, one with a maximum of 3.

# %%
x = np.zeros((2, 16), np.float32)
x[0] = [40, -30, 20, 10, 8, 6, 4, 3, 2, 1.5, 1, 0.5, 0, 0, 0, 0]
x[1] = [3, 2, -1, 0.5, 0.25, 0.1, 3, 2, -1, 0.5, 0.25, 0.1, 0, 0, 0, 0]
q = fp4.quantize(x, fp4.NVFP4)
print(q)
print("tensor scale:", q.tensor_scale)
print("block scales:", q.block_scales.ravel())
print("codes:")
print(q.codes)

# %% [markdown]
# Two codes share a byte, the first one in the low half. So 16 numbers take 8 bytes.
# A block adds one byte for its scale: 4.5 bits a number. (Our tensor is tiny, so the 4 bytes of the
# tensor scale still show.)
#
# Now the same by hand. Write *amax* for the largest magnitude.
# The tensor scale is chosen so that the tensor's largest block gets the largest scale, 448, and its
# largest element the largest code, 6.

# %%
tensor_scale = np.abs(x).max() / (6 * 448)
print(f"tensor scale: 40 / (6 · 448) = {tensor_scale:.7f}")

ideal = np.abs(x).max(axis=1) / 6 / tensor_scale
block_scale = ideal.astype(fp4.formats.E4M3.dtype).astype(np.float32)
for i in range(2):
    print(f"block {i}: amax / 6 / tensor scale = {ideal[i]:.2f}, in E4M3 {block_scale[i]:g}")

# %% [markdown]
# The second block's scale should be 33.6. E4M3 has only 32 and 36 there, so it becomes 32.
# The scale is rounded, too. Keep this in mind: the block's maximum will land a little above 6.

# %%
ratio = x / (block_scale * tensor_scale)[:, None]
element = ratio.astype(fp4.formats.E2M1.dtype).astype(np.float32)
by_hand = element * (block_scale * tensor_scale)[:, None]

shown = [*range(12)]
for i in range(2):
    table(
        [f"block {i}", *(f"{v:g}" for v in x[i, shown])],
        [
            ["divided by both scales", *(f"{v:.3g}" for v in ratio[i, shown])],
            ["nearest E2M1", *(f"{v:g}" for v in element[i, shown])],
            ["times both scales", *(f"{v:.3g}" for v in by_hand[i, shown])],
        ],
    )
np.testing.assert_allclose(by_hand, q.dequantize(), rtol=1e-6)

# %% [markdown]
# The last line of the cell compares our numbers with the library's: they agree.
#
# Three things happened:
#
# * 40, 20 and 10 came back as they were. −30 became −26.7: it landed on −4.5, and −4 is nearest.
# * 1.5 and less became 0 in the first block. They share their scale with 40. In the second block
#   1 stays near 1, for its scale is smaller. *This is why blocks are short.*
# * 3 became 2.86 in the second block. It landed on 6.3 and was cut off to 6, since its scale was
#   rounded down.

# %% [markdown]
# ## 3. Why there is a tensor scale
#
# Gradients are small: 10⁻⁶ is nothing unusual. The smallest E4M3 scale is 2⁻⁹, about 0.002.
# Without a tensor scale, every block scale of such a tensor rounds to zero. A format is one value,
# so the experiment is one line.

# %%
without = dataclasses.replace(fp4.NVFP4, name="nvfp4 without tensor scale", tensor_scale=False)
gradient = 1e-6 * jax.random.normal(jax.random.key(0), (64, 256))
for format in (fp4.NVFP4, without):
    approximation = fp4.fake_quantize(gradient, format)
    print(f"{format.name}: {jnp.mean(approximation == 0):.0%} zeros; the first four numbers:")
    print("  ", approximation[0, :4])
print("before:", gradient[0, :4])

# %% [markdown]
# `fake_quantize` is quantize and dequantize in one step. Without the tensor scale *all* is zero.
#
# To see the whole picture, we need a measure of error. The usual one is the **SQNR**, the signal to
# quantization noise ratio: 20 dB mean that the error is a tenth of the signal (in the 2-norm),
# 40 dB a hundredth, 0 dB that the error is as large as the signal.

# %%
sizes = 10.0 ** np.arange(-9, 6.1, 0.5)
normal = jax.random.normal(jax.random.key(1), (64, 256))
figure, axes = plt.subplots(figsize=(6, 3))
for format in (fp4.NVFP4, without, fp4.FP4_UE5M3, fp4.MXFP4):
    sqnr = [damage(s * normal, fp4.fake_quantize(s * normal, format)).sqnr_db for s in sizes]
    axes.semilogx(sizes, sqnr, ".-", label=format.name)
axes.set_xlabel("standard deviation of the Gaussian tensor (no unit)")
axes.set_ylabel("SQNR (dB)")
axes.legend()
plt.show()

# %% [markdown]
# **What to see.** With a tensor scale the size does not matter: a flat line.
# Without, there is a window, and outside of it the signal is lost: zeros on the left, saturation on
# the right. UE5M3, a block scale with one more exponent bit and no sign, widens the window, not
# enough for gradients. MXFP4's block scales are powers of two with an enormous range and need no
# tensor scale. But its line is lower and wavy: a power of two fits a block's maximum badly, and its
# blocks are twice as long.

# %% [markdown]
# ## 4. Square tiles for weights
#
# A weight is used twice. The forward pass sums along one of its axes, the backward pass along the
# other. Blocks run along the sum. So there are two sets of blocks, and *two different quantized
# weights*: the backward pass differentiates a function that the forward pass did not compute.
#
# Tiles of 16×16 with one scale solve this: they look the same from both sides.

# %%
w = jax.random.normal(jax.random.key(2), (256, 256)) / 16
rows = []
for tile in ((1, 16), (16, 16)):
    quantizer = fp4.Quantizer(fp4.NVFP4, tile=tile)
    forward, backward = (fp4.fake_quantize(w, quantizer, axis=axis) for axis in (0, 1))
    rows.append(
        [
            f"{tile[0]}×{tile[1]}",
            f"{jnp.mean(forward != backward):.0%}",
            f"{damage(w, forward).sqnr_db:.1f} dB",
            f"{8 * fp4.quantize(w, quantizer).nbytes / w.size:.2f}",
        ]
    )
table(["tile", "elements that differ between the passes", "SQNR", "bits per element"], rows)

# %% [markdown]
# The square tile makes the two passes agree. It costs a little SQNR: 256 numbers share a scale now,
# and the largest of 256 is larger than the largest of 16. The picture shows the scales.

# %%
corner = w[:32, :32]
figure, axes = plt.subplots(1, 2, figsize=(6, 2.6), sharey=True)
for ax, tile in zip(axes, ((1, 16), (16, 16)), strict=True):
    q = fp4.quantize(corner, fp4.Quantizer(fp4.NVFP4, tile=tile))
    scales = q.block_scales.astype(jnp.float32) * q.tensor_scale
    repeated = jnp.repeat(jnp.repeat(scales, tile[0], axis=0), tile[1], axis=1)
    image = ax.imshow(repeated, vmin=0, vmax=0.04)
    ax.set_title(f"{tile[0]}×{tile[1]} tiles")
    ax.set_xlabel("column")
    ax.grid(False)
axes[0].set_ylabel("row")
figure.colorbar(image, ax=axes, label="block scale × tensor scale (no unit)")
plt.show()

# %% [markdown]
# **What to see.** On the left every 16 numbers of a row have a scale of their own: 64 scales.
# On the right there are 4, and all are high: each has to serve the largest number of its tile.

# %% [markdown]
# ## 5. A transform against outliers
#
# One large number in a block spoils it for the others. Here, fifteen numbers around ½ meet a 20.

# %%
block = 0.5 * jax.random.normal(jax.random.key(3), (1, 16))
block = block.at[0, 5].set(20.0)
hadamard = fp4.Hadamard(16)
turned = hadamard(block, axis=-1)
plain = fp4.fake_quantize(block, fp4.NVFP4)
through = fp4.fake_quantize(block, fp4.Quantizer(fp4.NVFP4, hadamard=hadamard))

position = np.arange(16)
figure, axes = plt.subplots(1, 2, figsize=(8.5, 2.8))
axes[0].bar(position - 0.2, block[0], 0.4, label="block")
axes[0].bar(position + 0.2, turned[0], 0.4, label="transformed")
axes[0].set_title("the block and its transform")
for shift, name, numbers in [(-0.25, "before", block), (0, "NVFP4", plain)]:
    axes[1].bar(position + shift, numbers[0], 0.25, label=name)
axes[1].bar(position + 0.25, through[0], 0.25, label="NVFP4, transformed")
axes[1].set_ylim(-4, 3)
axes[1].set_title("quantized; the outlier, 20, is cut off")
for ax in axes:
    ax.set_xlabel("position in the block")
    ax.set_ylabel("number (no unit)")
    ax.legend()
plt.show()
print("NVFP4:             ", np.round(plain[0], 2))
print("NVFP4, transformed:", np.round(through[0], 2))

# %% [markdown]
# **What to see, left.** The Hadamard transform replaces 16 numbers by 16 signed sums of them, each
# divided by 4. The outlier is in every sum, so all have about the same size: 20 / 4.
#
# **What to see, right.** Without the transform the outlier is exact, and nearly every small number
# is lost (no bar). With it none is lost, but none is right either: transformed back, the errors of
# the sums are spread over all sixteen.
#
# In a product both operands are transformed alike. Then the transform cancels: it is orthogonal.
#
# Is that a good bargain? We let the outlier grow, in many blocks, and look at the small numbers
# alone.

# %%
outliers = 2.0 ** np.arange(0, 10.1, 0.5)
many = 0.5 * jax.random.normal(jax.random.key(4), (1024, 16))
transformed = fp4.Quantizer(fp4.NVFP4, hadamard=hadamard)

figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
for name, quantizer in {"NVFP4": fp4.NVFP4, "NVFP4, transformed": transformed}.items():
    small = []
    for outlier in outliers:
        data = many.at[:, 5].set(outlier)
        pair = (jnp.delete(t, 5, axis=1) for t in (data, fp4.fake_quantize(data, quantizer)))
        small.append(damage(*pair))
    axes[0].semilogx(outliers / 0.5, [100 * d.underflow for d in small], ".-", label=name)
    axes[1].semilogx(outliers / 0.5, [100 * (1 + d.bias) for d in small], ".-", label=name)
    axes[2].semilogx(outliers / 0.5, [100 * d.relative_error for d in small], ".-", label=name)
axes[0].set_ylabel("underflow (%)")
axes[1].set_ylabel("signal left, 1 + bias (%)")
axes[2].set_ylabel("error / signal (%)")
for ax in axes:
    ax.set_xlabel("outlier / RMS of the other 15 numbers")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
plt.show()

# %% [markdown]
# **What to see.** Left and middle: where the outlier is 30 to 60 times the rest, the transform
# keeps small numbers alive that would vanish. From about 100 times on it cannot save them.
# Right: their error is *not* smaller. It is larger.
#
# If that surprises you: an error can be a loss, always in the same direction, or noise, which
# averages out over many products and many training steps. The transform trades a loss for
# something more like noise. The trade is not perfect: in the middle picture the small numbers come
# back up to half too large.

# %% [markdown]
# ## 6. Every format on the tensors of a real, small model
#
# Random numbers are easy. Now a model that has learned something: it reads 16 bytes of Python's own
# source code and predicts the next one. Two blocks of an MLP with squared ReLU (as in the models of
# arXiv 2509.25149), in plain JAX and float32.

# %%
library = Path(sysconfig.get_paths()["stdlib"])
source = b"\n".join(path.read_bytes() for path in sorted(library.glob("[a-z]*.py")))[:2_000_000]
text = np.frombuffer(source, np.uint8)
CONTEXT, EMBED, WIDTH, HIDDEN = 16, 32, 128, 512
SHAPES = {
    "embed": (256, EMBED),
    "enter": (CONTEXT * EMBED, WIDTH),
    "up 0": (WIDTH, HIDDEN),
    "down 0": (HIDDEN, WIDTH),
    "up 1": (WIDTH, HIDDEN),
    "down 1": (HIDDEN, WIDTH),
    "leave": (WIDTH, 256),
}


def batch(step, size):
    """Contexts [size, CONTEXT] and the bytes that follow them [size]."""
    start = np.random.default_rng(step).integers(0, len(text) - CONTEXT, size)
    window = text[start[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return window[:, :-1], window[:, -1]


def norm(x):
    """Each row divided by its RMS."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss(params, taps, context, following):
    """Mean cross entropy in nats, and the inputs of all linear layers."""
    inputs = {}

    def linear(name, x):
        inputs[name] = x
        return x @ params[name] + taps.get(name, 0.0)

    h = linear("enter", params["embed"][context].reshape(len(context), -1))
    for i in range(2):
        h = h + linear(f"down {i}", jnp.square(jax.nn.relu(linear(f"up {i}", norm(h)))))
    logits = linear("leave", norm(h))
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean(), inputs


# %% [markdown]
# `taps` are zeros added to the layers' outputs. They change nothing. But the derivative with
# respect to a tap is the gradient of its layer's output, `dy`. That is how we look inside.

# %%
STEPS = 500
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))


@jax.jit
def train_step(params, state, context, following):
    """One step of Adam; the parameters, the optimizer's state and the loss."""
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, {}, context, following)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


keys = jax.random.split(jax.random.key(5), len(SHAPES))
params = {
    name: jax.random.normal(key, shape) / np.sqrt(shape[0])
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
}
state = optimizer.init(params)
losses = []
for step in range(STEPS):
    params, state, value = train_step(params, state, *batch(step, 256))
    losses.append(value)
print(f"{sum(p.size for p in params.values()):,} parameters")
for step in (0, 10, 100, STEPS - 1):
    print(f"step {step:3}: {losses[step]:.2f} nats per byte")

# %% [markdown]
# A uniform guess costs log 256 = 5.55 nats. The model has learned a good deal.
#
# We take the input `x`, the weight `w` and the output gradient `dy` of the two layers of the last
# block, on fresh text.

# %%
context, following = batch(STEPS, 512)
taps = {name: jnp.zeros((512, SHAPES[name][1])) for name in ("up 1", "down 1")}
derivative = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True))
(_, inputs), output_gradients = derivative(params, taps, context, following)
# Each with the axis that the product sums over: features for x and dy, inputs for w.
tensors = {
    "x of up (after norm)": (inputs["up 1"], 1),
    "x of down (squared ReLU)": (inputs["down 1"], 1),
    "w of up": (params["up 1"], 0),
    "dy of up": (output_gradients["up 1"], 1),
    "dy of down": (output_gradients["down 1"], 1),
}
table(
    ["tensor", "shape", "RMS", "largest / RMS", "exact zeros"],
    [
        [
            name,
            f"{t.shape[0]}×{t.shape[1]}",
            f"{jnp.sqrt(jnp.mean(t**2)):.1e}",
            f"{jnp.max(jnp.abs(t)) / jnp.sqrt(jnp.mean(t**2)):.0f}",
            f"{jnp.mean(t == 0):.0%}",
        ]
        for name, (t, _) in tensors.items()
    ],
)

# %% [markdown]
# Three things to notice before anything is quantized. Squared ReLU makes most numbers exactly zero,
# in its output and in the gradient that passes back through it. The numbers that are left in these
# two tensors have spikes, of dozens of times the RMS. And the gradients are tiny.
#
# Whether a number survives depends on its size *relative to its block's maximum*. The next figure
# counts: what share of the (non-zero) numbers lies below a given fraction of their block's maximum?

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for name, (t, axis) in tensors.items():
    blocks = np.abs(np.moveaxis(t, axis, -1)).reshape(-1, 16)
    largest = blocks.max(axis=1, keepdims=True)
    fraction = (blocks / np.where(largest > 0, largest, 1))[blocks > 0]
    axes.semilogx(np.sort(fraction), np.linspace(0, 100, fraction.size), label=name)
axes.axvline(1 / 24, color="0.3", linestyle="--")
axes.annotate("rounds to 0", (1 / 26, 90), ha="right")
axes.set_xlim(1e-4, 1)
axes.set_xlabel("magnitude / largest magnitude in its block of 16 (no unit)")
axes.set_ylabel("share of non-zero numbers below (%)")
axes.legend()
plt.show()

# %% [markdown]
# **What to see.** The block's maximum becomes 6 and everything below ¼ becomes 0: that is, below
# 1/24 of the maximum, the dashed line. The height of a curve there is the tensor's underflow in
# NVFP4. The two tensors with spikes lose two to four times as many numbers as the others.
# (The jump at the right edge is the maxima themselves.)
#
# Now everything at once. `damage` measures
#
# * **SQNR** in dB, as above;
# * **bias**: how much the tensor shrank (negative) or grew (positive) along itself, in percent;
# * **underflow**: the share of non-zero numbers that became zero.
#
# Stochastic rounding (SR) rounds up or down by chance. For it we show the mean of 32 draws.

# %%
SR = fp4.Stochastic()
quantizers = {
    "FP8 tensor E4M3": fp4.Quantizer(fp4.FP8_TENSOR),
    "FP8 tensor E5M2": fp4.Quantizer(fp4.FP8_TENSOR_E5M2),
    "FP8 blocks": fp4.Quantizer(fp4.FP8_BLOCK),
    "MXFP8 E4M3": fp4.Quantizer(fp4.MXFP8_E4M3),
    "MXFP8 E5M2": fp4.Quantizer(fp4.MXFP8_E5M2),
    "NVFP4": fp4.Quantizer(fp4.NVFP4),
    "NVFP4 16×16": fp4.Quantizer(fp4.NVFP4, tile=(16, 16)),
    "NVFP4 four over six": fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.FourOverSix("mse")),
    "NVFP4 Hadamard": fp4.Quantizer(fp4.NVFP4, hadamard=hadamard),
    "NVFP4 SR": fp4.Quantizer(fp4.NVFP4, rounding=SR),
    "NVFP4 SR, headroom": fp4.Quantizer(
        fp4.NVFP4, rounding=SR, scale_rule=fp4.AmaxScale(headroom=17 / 16)
    ),
    "NVFP4 no tensor scale": fp4.Quantizer(without),
    "FP4 UE5M3": fp4.Quantizer(fp4.FP4_UE5M3),
    "MXFP4": fp4.Quantizer(fp4.MXFP4),
    "MXFP4 rceil": fp4.Quantizer(fp4.MXFP4, scale_rule=fp4.PowerOfTwo("rceil")),
    "NVINT4": fp4.Quantizer(fp4.NVINT4),
    "IF4 (E2M1 or INT4)": fp4.Quantizer(fp4.IF4),
}


def measure(t, axis, quantizer):
    """The damage of `t`, blocks along `axis`; averaged over draws where there is chance."""
    if not quantizer.needs_key:
        return damage(t, fp4.fake_quantize(t, quantizer, axis=axis))
    keys = jax.random.split(jax.random.key(6), 32)
    draws = jax.vmap(lambda key: damage(t, fp4.fake_quantize(t, quantizer, axis=axis, key=key)))
    return jax.tree.map(jnp.mean, draws(keys))


damages = {
    name: jax.device_get([measure(t, axis, quantizer) for t, axis in tensors.values()])
    for name, quantizer in quantizers.items()
}
print("Each cell: SQNR in dB, bias, underflow.")
table(
    ["quantizer", *tensors],
    [
        [name, *(f"{d.sqnr_db:z.1f}, {d.bias:+.1%}, {d.underflow:.0%}" for d in row)]
        for name, row in damages.items()
    ],
)

# %%
figure, axes = plt.subplots(1, 3, figsize=(9.5, 4), sharey=True)
height = np.arange(len(damages))
for i, (name, marker) in enumerate(zip(tensors, "osD^v", strict=True)):
    style = {"marker": marker, "linestyle": "", "markersize": 4, "label": name}
    axes[0].plot([row[i].sqnr_db for row in damages.values()], height, **style)
    axes[1].plot([100 * row[i].bias for row in damages.values()], height, **style)
    axes[2].plot([100 * row[i].underflow for row in damages.values()], height, **style)
axes[0].set_yticks(height, list(damages))
axes[0].invert_yaxis()
axes[0].set_xlabel("SQNR (dB)")
axes[1].set_xlabel("bias along the signal (%)")
axes[1].set_xscale("symlog", linthresh=1)
axes[2].set_xlabel("underflow (% of non-zero numbers)")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
plt.show()

# %% [markdown]
# **What to see.** Take it row by row.
#
# * *FP8 and FP4.* E4M3 leaves an error of about 3% (31 dB), E5M2 of 5%, NVFP4 of 10%
#   (20 dB) where there are no spikes.
# * *Spikes.* NVFP4's SQNR is *higher* on the two tensors with spikes, though more numbers are lost.
#   SQNR counts energy, and the spikes have nearly all of it. Do not look at the SQNR alone.
# * *Square tiles* lose half of the non-zero numbers of these tensors, but few more of the weight's.
#   So the recipe of arXiv 2509.25149 has them for weights only.
# * *Four over six* and *IF4* choose between two scales, or two grids, block by block. Both gain.
# * *No tensor scale*: nothing is left of the gradients. With UE5M3 about half of their numbers or
#   more vanish.
# * *MXFP4* shrinks every tensor by 2 to 5%. Its default scale, the OCP specification's, lets a
#   block's maximum lie above 6, where it saturates. `rceil` is the smallest power of two that
#   prevents this; the bias falls, the SQNR changes by less than 1 dB.
# * *NVINT4*, evenly spaced, is better where numbers are of like size and worse where there are
#   spikes. That is the choice between absolute and relative precision from the first figure.
# * *Hadamard*: less underflow everywhere, less SQNR on spikes, as in section 5. The bias above zero
#   has the same cause as the transform's success: after it, all sums of a block with one spike are
#   about as large as the block's maximum, and round up to it together.
# * *Stochastic rounding* has a lower SQNR than nearest rounding in every column, with headroom even
#   more so. But with headroom its bias is zero in every column, as with no other 4-bit row. The
#   notebook *Comparing rounding schemes* shows why that matters, and what headroom is.

# %% [markdown]
# ### The transform where it is used
#
# The recipe of arXiv 2509.25149 transforms two operands only: `x` and `dy` in the product
# `dw = xᵀ dy`, which sums over tokens. So the blocks run along the tokens, axis 0.

# %%
rows = []
for layer in ("up 1", "down 1"):
    x, dy = inputs[layer], output_gradients[layer]
    for name in ("NVFP4", "NVFP4 Hadamard"):
        x4, dy4 = (fp4.fake_quantize(t, quantizers[name], axis=0) for t in (x, dy))
        dw = damage(x.T @ dy, x4.T @ dy4)
        lost = [f"{damage(t, t4).underflow:.0%}" for t, t4 in ((x, x4), (dy, dy4))]
        rows.append([layer, name, *lost, f"{dw.sqnr_db:.1f} dB"])
table(["layer", "quantizer", "underflow of x", "underflow of dy", "SQNR of dw"], rows)

# %% [markdown]
# **A surprise.** Fewer numbers underflow, as promised. But the weight gradient's error is larger
# with the transform. In this small model the spikes come from sparsity: a block with one large
# number and many zeros is nearly exact as it is. The paper saw a lower training loss with the
# transform, in models of billions of parameters. An SQNR does not decide what trains well. A
# training run does: `experiments/compare.py`.
#
# ## What to remember
#
# * Four bits hold a sign and eight magnitudes. All else is scaling.
# * A short block keeps an outlier's damage local. A tensor scale keeps tiny gradients alive.
# * Underflow, bias and SQNR tell different stories. Look at all three.
# * What is good for one tensor is bad for another. That is why a recipe gives each operand of each
#   product its own quantizer.
