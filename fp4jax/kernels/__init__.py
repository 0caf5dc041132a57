"""Other bodies of two operations, `quantize` and `scaled_matmul`: same arguments, same bytes."""
