"""Programs that put fp4jax to use: each is a config dataclass and a main."""
