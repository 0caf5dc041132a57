"""fp4jax: training neural networks in 4-bit floating point, bit for bit, on any machine."""

from fp4jax import nnx as nnx
from fp4jax import recipes as recipes
from fp4jax.formats import FP8_BLOCK as FP8_BLOCK
from fp4jax.formats import NVFP4 as NVFP4
from fp4jax.formats import Format as Format
from fp4jax.hadamard import Hadamard as Hadamard
from fp4jax.matmul import dot_general as dot_general
from fp4jax.policy import Policy as Policy
from fp4jax.qtensor import QTensor as QTensor
from fp4jax.quantize import fake_quantize as fake_quantize
from fp4jax.quantize import quantize as quantize
from fp4jax.quantizer import Quantizer as Quantizer
from fp4jax.recipe import Cast as Cast
from fp4jax.recipe import Gemm as Gemm
from fp4jax.recipe import Recipe as Recipe
from fp4jax.rounding import Nearest as Nearest
from fp4jax.rounding import Stochastic as Stochastic
from fp4jax.scaling import AmaxScale as AmaxScale
