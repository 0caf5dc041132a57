"""mesh_table: what two layers send and keep, against the sizes that formats have."""

import numpy as np
import pytest

import fp4jax as fp4
from experiments.mesh_table import Sizes, find

SIZES = Sizes(tokens=128, width=128, hidden=256)


@pytest.mark.usefixtures("lenient_promotion")
def test_bytes_are_those_of_the_formats():
    nvfp4 = fp4.recipes.nvfp4(square_weights=False)
    elements = SIZES.width * SIZES.hidden
    activations = SIZES.tokens * (SIZES.width + SIZES.hidden)
    single = find(nvfp4, SIZES, (1, 1, 1))
    assert single.gathered == {}
    for recipe, dtype, bits in ((nvfp4, "u8", 4.5), (fp4.recipes.bf16(), "u16", 16)):
        found = find(recipe, SIZES, (1, 4, 1))
        assert found.gathered == {dtype: 2 * 2 * elements * bits / 8}
        # Besides: tensor scales, and the words of the random streams.
        assert 0 <= found.kept - activations / 4 * bits / 8 < 1000
        if recipe == nvfp4:
            np.testing.assert_array_equal(found.result, single.result)
