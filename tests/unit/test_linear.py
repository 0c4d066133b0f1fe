import pytest
import torch
import torch.nn.functional as F

from prefixcache.model.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_plain_product_in_every_dtype(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 40).to(dtype), torch.randn(num_rows, 40).to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(Linear(weight, bias)(x), F.linear(x, weight, bias), rtol=tolerance, atol=tolerance)
