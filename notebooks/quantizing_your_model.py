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
# # Quantizing your own Flax model
#
# You have a model in Flax. You want to know what happens when its matrix products run in 4 bits.
# This notebook takes two plain models, one in NNX and one in Linen, and converts both. Their code
# is not touched.
#
# You need to know Flax. *Formats and rounding* explains what is done to the numbers.
#
# 1. A model as its author wrote it
# 2. Look before you convert
# 3. Converting, in one line
# 4. Memory before and after
# 5. Loss before and after
# 6. Changing one part
# 7. A late switch to BF16
# 8. The same for a Linen model

# %%
import io

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen, nnx
from IPython.display import Markdown, display

import fp4jax as fp4
from experiments.saved_bytes import saved_bytes
from fp4jax.diagnostics import damage

plt.rcParams.update({"figure.dpi": 64, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9})


def table(header, rows):
    """Shows rows of strings as a table."""
    lines = [header, ["---"] * len(header), *rows]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))


# %% [markdown]
# ## 1. A model as its author wrote it
#
# A small decoder-only transformer: Flax's own attention, two linear layers for the MLP, and a
# short convolution after the embedding. It knows nothing of quantization.

# %%
SYMBOLS, WIDTH = 16, 64


class Block(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """Predicts the next symbol."""

    def __init__(self, rngs, depth=1):
        self.embed = nnx.Embed(SYMBOLS, WIDTH, rngs=rngs)
        self.local = nnx.Conv(WIDTH, WIDTH, 3, padding="CAUSAL", rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)

    def __call__(self, symbols):
        x = self.embed(symbols)
        x = x + self.local(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# We shall train it with a single block, so that the whole notebook takes a minute on two cores.
#
# The task: a symbol is a function of the two before it. The function is a table drawn by chance,
# the same for the whole notebook. Now and then a symbol is drawn at random instead, so no model can
# be sure. That gives a lowest possible loss, which we can work out.

# %%
BATCH, LENGTH, STEPS = 16, 32, 120
NOISE = 0.1
NEXT = np.random.default_rng(0).integers(0, SYMBOLS, (SYMBOLS, SYMBOLS))

wrong = NOISE / SYMBOLS  # the chance of each symbol that the table does not say
right = 1 - (SYMBOLS - 1) * wrong
LOWEST = -right * np.log(right) - (SYMBOLS - 1) * wrong * np.log(wrong)


def sequences(seed, steps=STEPS):
    """A batch of symbols for each step."""
    rng = np.random.default_rng(seed)
    symbols = rng.integers(0, SYMBOLS, (steps, BATCH, LENGTH + 1), dtype=np.int32)
    noisy = rng.random(symbols.shape) < NOISE
    for i in range(2, LENGTH + 1):
        said = NEXT[symbols[..., i - 1], symbols[..., i - 2]]
        symbols[..., i] = np.where(noisy[..., i], symbols[..., i], said)
    return symbols


print(f"the lowest possible loss: {LOWEST:.3f} nats, of a blind guess: {np.log(SYMBOLS):.3f}")

# %% [markdown]
# And the training step, as one would write it. The line with `traces` is only for section 7: it
# runs when JAX traces the function, not when the compiled function runs.

# %%
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
traces = []


def loss_of(model, symbols):
    """Mean cross entropy of the symbols that have two before them."""
    logits = model(symbols[:, :-1])[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 2:]).mean()


@nnx.jit
def training_step(model, optimizer, symbols):
    """Changes the model in place and returns the loss before that."""
    traces.append("training_step")
    loss, gradients = nnx.value_and_grad(loss_of)(model, symbols)
    optimizer.update(model, gradients)
    return loss


def train(model, seed):
    """The loss at each step."""
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    return np.array([training_step(model, state, batch) for batch in sequences(seed)])


model = Decoder(nnx.Rngs(0))
losses = {("float32", 0): train(model, 0)}
print(
    "loss of 20 steps each:", *(f"{part.mean():.3f}" for part in np.split(losses["float32", 0], 6))
)

# %% [markdown]
# It learns. We save its parameters, as a file of arrays named by their paths. This is our stand-in
# for whatever checkpoint you have.


# %%
def parameters(model):
    """The model's parameters by dotted path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
    }


checkpoint = io.BytesIO()
np.savez(checkpoint, **{path: parameter[...] for path, parameter in parameters(model).items()})
print(f"{len(parameters(model))} arrays, {checkpoint.tell():,} bytes")

# %% [markdown]
# ## 2. Look before you convert
#
# A `Policy` says which layer gets which recipe. `explain` shows what it would do to a model, and
# changes nothing. `keep_ends` is the policy of arXiv 2509.25149: 4 bits for the repeated blocks,
# BF16 for the first and last few of them. To see both, we look at a deeper sibling of our model.

# %%
nvfp4 = fp4.recipes.nvfp4()
deep = Decoder(nnx.Rngs(0), depth=3)
print(fp4.Policy.keep_ends(last=1, recipe=nvfp4).explain(deep))

# %% [markdown]
# Three things to see.
#
# * Flax's attention is four linear layers, and they are reached.
# * The head and the convolution are listed but *untouched*: they are in no block.
# * The embedding and the norms are not even listed. They multiply by no matrix, so there is nothing
#   to quantize. The products inside attention, of queries with keys and of weights with values,
#   have no kernel either. They stay as they were.
#
# For anything else, write rules. The first rule that matches a layer decides; later ones do not
# change it. A rule says where by a pattern over the dotted path (`*` also matches dots), or by a
# function of the layer. `None` means: leave it.


# %%
def large(layer):
    """Whether a layer has a kernel worth the trouble."""
    return layer.parameters > 10_000


policy = fp4.Policy(
    [
        fp4.Rule("head", None),
        fp4.Rule("*.attention.*", fp4.recipes.mxfp8()),
        fp4.Rule(large, nvfp4),
    ]
)
print(policy.explain(deep))

# %% [markdown]
# The convolution has more than enough parameters, but `large` did not get it. A rule means
# convolutions only if it says so: `convolutions=True`. (They are quantized as
# matrix products over patches.)

# %%
print(fp4.Policy([fp4.Rule(large, nvfp4, convolutions=True)]).explain(model))

# %% [markdown]
# What if a pattern has a typing error? A run that quietly trains in full precision would be worse
# than a crash. So a rule that reaches nothing is an error, and so is one that comes too late to
# decide anything.

# %%
for rules in (
    [fp4.Rule("*.atention.*", nvfp4)],
    [fp4.Rule("blocks.*", nvfp4), fp4.Rule("*.up", fp4.recipes.bf16())],
    [fp4.Rule("local", nvfp4)],
):
    try:
        fp4.Policy(rules).explain(model)
    except ValueError as error:
        print("ValueError:", error, end="\n\n")

# %% [markdown]
# ## 3. Converting, in one line
#
# `quantize_model` changes the model in place. Gradients are rounded by chance, so it wants a random
# stream, called `quantize`.

# %%
everything = fp4.Policy.keep_ends(recipe=nvfp4)
before = parameters(model)
fp4.nnx.quantize_model(model, everything, rngs=nnx.Rngs(quantize=0))
after = parameters(model)

print("the same paths:  ", before.keys() == after.keys())
print("the same objects:", all(after[path] is before[path] for path in before))
up = model.blocks[0].up
print(type(up).__module__, type(up).__name__, "with a kernel in", up.kernel[...].dtype)

# %% [markdown]
# The layers are Flax's own layers with another product. Their kernels are the same objects, in
# float32, and only quantized on the way into a product. An optimizer that was made for them before
# goes on with them.
#
# So a checkpoint from before fits. We load it into a new, quantized model with other weights.

# %%
converted = fp4.nnx.quantize_model(Decoder(nnx.Rngs(9)), everything, rngs=nnx.Rngs(quantize=0))
with np.load(io.BytesIO(checkpoint.getvalue())) as saved:
    for path, parameter in parameters(converted).items():
        parameter[...] = jnp.asarray(saved[path])
pairs = zip(parameters(model).values(), parameters(converted).values(), strict=True)
print("equal:", all(jnp.array_equal(a[...], b[...]) for a, b in pairs))
print(
    "state besides parameters:", len(jax.tree.leaves(nnx.state(converted, nnx.RngState))), "arrays"
)

# %% [markdown]
# One caution. Each quantized layer has a random stream of its own, a key and a counter. They are
# part of `nnx.state(model)`, but not of `nnx.state(model, nnx.Param)`. If your old checkpoint is of
# the whole state, load it first and convert then.

# %% [markdown]
# ## 4. Memory before and after
#
# For its backward pass a linear layer keeps its input. With 4-bit products the backward pass needs
# only the quantized input, so only that is kept. How much is that?
#
# `saved_bytes` asks JAX: it traces a layer and adds up the arrays which the backward pass reads,
# apart from the layer's own parameters. Nothing is run, so we can ask about layers of a size that
# matters, those of an MLP. A quantized weight is counted; a weight that is only cast is not kept,
# since it can be cast again.

# %%
MLP_WIDTH, TOKENS = 1024, 4096  # up: 1024 to 4096 features; down: back again
recipes = {
    "float32": None,
    "bf16": fp4.recipes.bf16(),
    "fp8_block": fp4.recipes.fp8_block(),
    "mxfp4": fp4.recipes.mxfp4(),
    "nvfp4": nvfp4,
}


def mlp(recipe, activation=nnx.gelu):
    """Two linear layers with an activation between them."""
    rngs = nnx.Rngs(0)
    layers = nnx.Sequential(
        nnx.Linear(MLP_WIDTH, 4 * MLP_WIDTH, rngs=rngs),
        activation,
        nnx.Linear(4 * MLP_WIDTH, MLP_WIDTH, rngs=rngs),
    )
    if recipe is None:
        return layers
    return fp4.nnx.quantize_model(layers, fp4.Policy([fp4.Rule("*", recipe)]), rngs=rngs)


kept = {}
for name, recipe in recipes.items():
    narrow, wide = (jax.ShapeDtypeStruct((TOKENS, n * MLP_WIDTH), jnp.float32) for n in (1, 4))
    written = mlp(recipe)
    recomputing = mlp(recipe, jax.checkpoint(nnx.gelu))
    sizes = [
        saved_bytes(written.layers[0], narrow),
        saved_bytes(written.layers[2], wide),
        saved_bytes(written, narrow),
        saved_bytes(recomputing, narrow),
    ]
    kept[name] = np.array(sizes) / 2**20

columns = ["up", "down", "MLP", "MLP, GELU recomputed"]
table(
    ["MiB kept", *columns],
    [[name, *(f"{size:.1f}" for size in sizes)] for name, sizes in kept.items()],
)

# %%
figure, axes = plt.subplots(figsize=(9, 3.4))
place = np.arange(len(columns))
for i, (name, sizes) in enumerate(kept.items()):
    bars = axes.bar(place + 0.18 * (i - 2), sizes, 0.17, label=name)
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
axes.set_xticks(place, columns)
axes.set_ylabel("kept for the backward pass (MiB)")
axes.legend(loc="upper left")
axes.grid(visible=False, axis="x")
plt.show()

# %%
ratio = {name: sizes[:2].sum() / kept["float32"][:2].sum() for name, sizes in kept.items()}
part = {name: 1 - sizes[:2].sum() / sizes[2] for name, sizes in kept.items()}
remat = kept["nvfp4"][3] / kept["float32"][3]
display(
    Markdown(
        f"**What to see, left.** The two layers alone keep {ratio['bf16']:.0%} of float32's bytes "
        f"in BF16, {ratio['fp8_block']:.0%} in FP8 and {ratio['nvfp4']:.0%} in NVFP4.\n\n"
        f"**What to see, right.** The MLP as a whole gains far less. The GELU between the layers "
        f"keeps the steps of its own formula, in the dtype that the model computes in, and no "
        f"recipe has a say in that: {part['float32']:.0%} of the bytes in float32, "
        f"{part['nvfp4']:.0%} in NVFP4. If the GELU is computed again in the backward pass "
        f"(`jax.checkpoint`), the MLP in NVFP4 keeps {remat:.0%} of the same in float32. So look "
        f"at what stands between your layers, too: once they are small, it is most of what is "
        f"left. (A compiler may decide to recompute some of this by itself.)"
    )
)

# %% [markdown]
# ## 5. Loss before and after
#
# Now we train three times three models: float32, the recipe `bf16`, and `nvfp4`, each from three
# seeds. Models of one seed start from the same weights and see the same batches in the same order.
# So we can subtract their losses step by step, and most of the noise goes away with it.
#
# No batch comes twice. The loss of a batch is computed before the model learns from it, so all
# these losses are of data that the model has not seen.

# %%
SEEDS = (0, 1, 2)


def quantized(seed, policy):
    """A new model of that seed with the policy applied."""
    return fp4.nnx.quantize_model(
        Decoder(nnx.Rngs(seed)), policy, rngs=nnx.Rngs(quantize=100 + seed)
    )


losses |= {("float32", seed): train(Decoder(nnx.Rngs(seed)), seed) for seed in SEEDS[1:]}
for name in ("bf16", "nvfp4"):
    policy = fp4.Policy.keep_ends(recipe=recipes[name])
    losses |= {(name, seed): train(quantized(seed, policy), seed) for seed in SEEDS}


def curves(name):
    """Losses by seed and step."""
    return np.array([losses[name, seed] for seed in SEEDS])


def show_ends(names):
    """A table of the losses at the end."""
    rows = []
    for name in names:
        last = curves(name)[:, -20:].mean(axis=1)
        gap = last - curves("float32")[:, -20:].mean(axis=1)
        error = gap.std(ddof=1) / np.sqrt(len(SEEDS))
        seeds = " ".join(f"{loss:.3f}" for loss in last)
        rows.append([name, seeds, f"{last.mean():.3f}", f"{gap.mean():+.4f} ± {error:.4f}"])
    header = ["", "loss of the last 20 steps, by seed", "mean", "gap to float32 ± standard error"]
    table(header, rows)


show_ends(["float32", "bf16", "nvfp4"])


# %%
def smooth(values):
    """Means of ten neighbouring steps along the last axis."""
    return np.lib.stride_tricks.sliding_window_view(values, 10, axis=-1).mean(axis=-1)


middle = smooth(np.arange(STEPS))
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for colour, name in (("0.75", "float32"), ("C0", "bf16"), ("C1", "nvfp4")):
    width = 5 if name == "float32" else 1.5
    mean = smooth(curves(name)).mean(axis=0)
    axes[0].plot(middle, mean, color=colour, linewidth=width, label=name)
    if name != "float32":
        gaps = smooth(curves(name) - curves("float32"))
        axes[1].plot(middle, gaps.T, color=colour, alpha=0.4, linewidth=1)
        axes[1].plot(middle, gaps.mean(axis=0), color=colour, label=name)
axes[0].axhline(LOWEST, color="0.5", linestyle=":", label="lowest possible")
axes[1].axhline(0, color="0.2", linewidth=1)
axes[0].set_ylabel("loss (nats), mean of 3 seeds")
axes[1].set_ylabel("loss − float32's (nats)")
for ax in axes:
    ax.set_xlabel("step")
    ax.legend()
plt.show()

# %%
spread = curves("float32")[:, -20:].mean(axis=1)
gaps = {name: (curves(name) - curves("float32"))[:, -20:].mean() for name in ("bf16", "nvfp4")}
display(
    Markdown(
        f"**What to see.** Left: the curves are close, BF16's inside float32's. Right: BF16 is on "
        f"zero ({gaps['bf16']:+.4f}). NVFP4 ends {gaps['nvfp4']:+.3f} above float32, "
        f"{gaps['nvfp4'] / spread.mean():.1%} of the loss. The seeds themselves are "
        f"{np.ptp(spread):.3f} apart. Two single runs that shared neither weights nor batches "
        f"could not have shown a gap as small as this; pairs can."
    )
)

# %% [markdown]
# Do not read more into it. This is a tiny model and a very short training, and the loss is far
# from its end. It shows that the conversion works, not what 4 bits cost at scale.

# %% [markdown]
# ## 6. Changing one part
#
# The recipe has three peculiarities: weights in square blocks, gradients rounded by chance, and a
# random Hadamard transform (RHT) before the weight gradient. What is each good for? We leave out
# one at a time, and last the quantization of the forward pass. Then we compare a layer's gradient
# with the one that unquantized layers give.
#
# All recipes get the same weights (the checkpoint) and the same batch. We quantize the MLP only.
# And we look at two numbers: the error of one gradient, and the error of the mean of many gradients
# of the same batch. Where chance is at work each of these is different. What the mean does not
# remove is a bias.

# %%
DRAWS = 16
fixed = sequences(7, steps=1)[0]
variants = {
    "nvfp4": nvfp4,
    "without RHT": fp4.recipes.nvfp4(hadamard=None),
    "nearest gradients": fp4.recipes.nvfp4(rounding=fp4.Nearest()),
    "1x16 weights": fp4.recipes.nvfp4(square_weights=False),
    "forward in BF16": nvfp4.replace(fprop=fp4.recipes.bf16().fprop),
}


@nnx.jit
def gradients_of(model, symbols):
    """Gradients of the MLP's two kernels."""
    gradients = nnx.grad(loss_of)(model, symbols)
    block = gradients["blocks"][0]
    return {
        "up": block["up"]["kernel"][...],
        "down": block["down"]["kernel"][...],
    }


def from_checkpoint(recipe):
    """The trained model, with its MLP quantized unless ``recipe`` is None."""
    model = Decoder(nnx.Rngs(0))
    with np.load(io.BytesIO(checkpoint.getvalue())) as saved:
        for path, parameter in parameters(model).items():
            parameter[...] = jnp.asarray(saved[path])
    if recipe is not None:
        rules = [fp4.Rule(f"*.{layer}", recipe) for layer in ("up", "down")]
        fp4.nnx.quantize_model(model, fp4.Policy(rules), rngs=nnx.Rngs(quantize=0))
    return model


exact = gradients_of(from_checkpoint(None), fixed)
errors = {}
for name, recipe in variants.items():
    model = from_checkpoint(recipe)
    draws = [gradients_of(model, fixed) for _ in range(DRAWS)]
    for layer, truth in exact.items():
        stack = np.stack([draw[layer] for draw in draws])
        one = np.mean([damage(truth, draw).relative_error for draw in stack])
        errors[name, layer] = one, damage(truth, stack.mean(axis=0)).relative_error

table(
    [f"error of one gradient / of the mean of {DRAWS}", *variants],
    [
        [layer, *("{:.1%} / {:.1%}".format(*errors[name, layer]) for name in variants)]
        for layer in exact
    ],
)

# %%
mean_of = {name: np.mean([errors[name, layer] for layer in exact], axis=0) for name in variants}
display(
    Markdown(
        f"**What to see.** For `nvfp4` the mean of {DRAWS} gradients still has an error of "
        f"{mean_of['nvfp4'][1]:.0%}. It is made in the forward pass: with rounded weights and "
        f"activations the model is another function, and that has another gradient. With BF16 in "
        f"the forward pass, one gradient is {mean_of['forward in BF16'][0]:.0%} off, their mean "
        f"{mean_of['forward in BF16'][1]:.0%}.\n\n"
        f"*Nearest* rounding of gradients gives {mean_of['nearest gradients'][0]:.0%}, with a mean "
        f"that is no better: {mean_of['nearest gradients'][1]:.0%}. For one step it would be the "
        f"right choice. Over many steps errors made by chance cancel and these do not.\n\n"
        f"*1x16 weights* have more scales and follow the weights more closely "
        f"({mean_of['1x16 weights'][0]:.0%}). What square blocks are for is not in this table: "
        f"with them the backward pass sees the same weights as the forward pass.\n\n"
        f"*Without RHT* the error is {mean_of['without RHT'][0]:.0%}, against "
        f"{mean_of['nvfp4'][0]:.0%} with it: no visible difference. The transform is there to "
        f"spread outliers; whether this small model has any we did not look."
    )
)

# %% [markdown]
# ## 7. A late switch to BF16
#
# Near the end of a training small errors matter more. The paper proposes to run the last part in
# BF16, of the forward pass only. That is a recipe that depends on the step: a `Schedule`.

# %%
schedule = fp4.Schedule.late_bf16(nvfp4, at=0.82, steps=STEPS)
late = fp4.Policy.keep_ends(recipe=schedule)
print(schedule.name)
print("the policy changes at steps", late.starts)

# %% [markdown]
# The training loop has to call `quantize_model` again at these steps. It does not touch parameters,
# optimizer or random streams, it only exchanges the products.

# %%
traces.clear()
for seed in SEEDS:
    model = quantized(seed, late)
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    curve = []
    for step, batch in enumerate(sequences(seed)):
        if step in late.starts:
            fp4.nnx.quantize_model(model, late, step=step)
        curve.append(training_step(model, state, batch))
    losses["nvfp4, late bf16", seed] = np.array(curve)

same = np.array_equal(
    curves("nvfp4, late bf16")[:, : late.starts[1]], curves("nvfp4")[:, : late.starts[1]]
)
print("traces:", len(traces), "for", len(SEEDS), "runs of", len(late.starts), "phases")
print("before the switch the losses are those of section 5:", same)
show_ends(["float32", "nvfp4", "nvfp4, late bf16"])

# %% [markdown]
# Why so few traces? A recipe is a static value. JAX traces a function again when a static value is
# new to it. The first phase is the recipe of section 5, which was compiled already, and seeds
# differ in nothing static. (This needs one `optimizer` for all of them: two calls of `optax.adam`
# give two different functions.)

# %%
after_switch = np.s_[:, late.starts[1] :]
gained = (curves("nvfp4") - curves("nvfp4, late bf16"))[after_switch].mean(axis=1)
figure, axes = plt.subplots(figsize=(6, 2.8))
for colour, name in (("C1", "nvfp4"), ("C2", "nvfp4, late bf16")):
    gaps = smooth(curves(name) - curves("float32"))
    axes.plot(middle, gaps.T, color=colour, alpha=0.4, linewidth=1)
    axes.plot(middle, gaps.mean(axis=0), color=colour, label=name)
axes.set_xlim(60, STEPS)
axes.axvline(late.starts[1], color="0.3", linestyle="--", label="switch")
axes.axhline(0, color="0.2", linewidth=1)
axes.set_xlabel("step (mean of the 10 around it)")
axes.set_ylabel("loss − float32's (nats)")
axes.legend(loc="lower left")
plt.show()
share = gained.mean() / (curves("nvfp4") - curves("float32"))[after_switch].mean()
display(
    Markdown(
        f"**What to see.** Up to the switch the green lines are the orange ones. After it the gap "
        f"is {share:.0%} smaller. By seed, the loss is "
        f"{', '.join(f'{g:.4f}' for g in gained)} lower. That is a small gain: with the "
        f"{STEPS - late.starts[1]} steps that are left, and a learning rate on its way to zero, "
        f"weights which were trained in 4 bits hardly move any more. The gradients are still "
        f"computed in 4 bits."
    )
)

# %% [markdown]
# ## 8. The same for a Linen model
#
# A Linen model is a description; its parameters live outside it. So nothing is changed in place:
# `quantize_model` returns another description that fits the same parameters. Here is a classifier
# of small pictures, again as its author wrote it.

# %%
CLASSES, SIDE = 8, 16


class MLPBlock(linen.Module):
    """Two layers around a GELU, added to the input."""

    @linen.compact
    def __call__(self, x):
        h = linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x))
        return x + linen.Dense(x.shape[-1])(linen.gelu(h))


class Classifier(linen.Module):
    """Patches, a block, the mean over patches, a head."""

    @linen.compact
    def __call__(self, pictures):
        x = linen.Conv(WIDTH, (4, 4), strides=(4, 4), name="patches")(pictures)
        x = x.reshape(len(x), -1, WIDTH)
        x = MLPBlock(name="block_0")(x)
        return linen.Dense(CLASSES, name="head")(x.mean(axis=1))


def pictures_of(seed, steps=60, batch=32):
    """Stripes in one of eight directions, shifted by chance, and noise; and the directions."""
    rng = np.random.default_rng(seed)
    directions = rng.integers(0, CLASSES, (steps, batch))
    angle = directions[..., None, None] * np.pi / CLASSES
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    phase = rng.uniform(0, 2 * np.pi, angle.shape)
    stripes = np.sin(1.2 * (across * np.cos(angle) + down * np.sin(angle)) + phase)
    noisy = stripes + rng.normal(size=stripes.shape)
    return noisy[..., None].astype(np.float32), directions.astype(np.int32)


pictures, directions = pictures_of(0)
figure, axes = plt.subplots(1, CLASSES, figsize=(9, 1.4))
for direction, ax in enumerate(axes):
    ax.imshow(pictures[directions == direction][0, ..., 0], cmap="Greys")
    ax.set_title(f"class {direction}")
    ax.axis("off")
plt.show()

# %% [markdown]
# Layers of a Linen model are found by tracing a call, so `explain` and `quantize_model` need an
# example input. Its shape is enough.

# %%
classifier = Classifier()
example = jax.ShapeDtypeStruct((1, SIDE, SIDE, 1), jnp.float32)
print(everything.explain(classifier, example))

classifier4 = fp4.linen.quantize_model(classifier, everything, example)
shapes, shapes4 = (
    jax.eval_shape(model.init, jax.random.key(0), example) for model in (classifier, classifier4)
)
print("\nthe same tree of parameters:", shapes == shapes4)
variables = jax.jit(classifier.init)(jax.random.key(0), pictures[0])

# %% [markdown]
# In training, each step gives a key for the stream `quantize`. Without one the model still runs
# forward, since only gradients are rounded by chance. But a gradient without one is refused.


# %%
def loss4(variables):
    """Any loss of the quantized model, without a key."""
    return classifier4.apply(variables, pictures[0]).sum()


print("forward: ", jax.eval_shape(loss4, variables))
try:
    jax.eval_shape(jax.grad(loss4), variables)
except ValueError as error:
    print("backward: ValueError:", error)


# %%
def train_linen(model, variables, seed):
    """The loss and the share of right answers at each step."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, len(pictures)))

    @jax.jit
    def step(variables, state, pictures, directions, key):
        def loss_of(variables):
            logits = model.apply(variables, pictures, rngs={"quantize": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, directions)
            return losses.mean(), jnp.mean(logits.argmax(axis=-1) == directions)

        result, gradients = jax.value_and_grad(loss_of, has_aux=True)(variables)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, result

    state, results = optimizer.init(variables), []
    keys = jax.random.split(jax.random.key(seed), len(pictures))
    for batch in zip(*pictures_of(seed), keys, strict=True):
        variables, state, result = step(variables, state, *batch)
        results.append(result)
    return np.array(results)


results = {
    "float32": train_linen(classifier, variables, 0),
    "nvfp4": train_linen(classifier4, variables, 0),
}
table(
    ["mean of the last 20 steps", "loss", "right answers"],
    [
        [name, f"{loss:.3f}", f"{right:.1%}"]
        for name, (loss, right) in ((n, r[-20:].mean(axis=0)) for n, r in results.items())
    ],
)
figure, axes = plt.subplots(figsize=(6, 2.8))
for (name, result), colour in zip(results.items(), ("0.75", "C1"), strict=True):
    width = 5 if name == "float32" else 1.5
    axes.plot(result[:, 0], color=colour, linewidth=width, label=name)
axes.set_xlabel("step")
axes.set_ylabel("loss (nats)")
axes.legend()
plt.show()

# %%
ends = {name: result[-20:].mean(axis=0) for name, result in results.items()}
display(
    Markdown(
        f"**What to see.** Both learn, along nearly the same curve. The loss differs by "
        f"{ends['nvfp4'][0] - ends['float32'][0]:+.3f}, the right answers by "
        f"{ends['nvfp4'][1] - ends['float32'][1]:+.1%}. This is one seed only, so neither number "
        f"says which of the two is better."
    )
)

# %% [markdown]
# ## What to remember
#
# * `explain` first. It shows which layers a policy reaches, and which it leaves alone.
# * Converting keeps the parameters: the same objects in NNX, the same tree in Linen. Old
#   checkpoints fit.
# * A rule that reaches nothing raises an error, and so does missing chance.
# * Memory for the backward pass shrinks in the quantized layers. What is between them stays.
# * Compare losses in pairs: the same weights, the same batches, several seeds.
# * A schedule costs one more trace for each phase, if the optimizer is made once.
