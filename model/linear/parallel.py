"""Linear layers of which a rank has some of the columns."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from model.parallel.group import Group


class RowLinear(nn.Linear):
    """`x W^T + b` where a rank has some of the columns of x and of W, and every rank the whole of b."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        whole = self.group.sum(functional.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias
