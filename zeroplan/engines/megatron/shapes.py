"""Sizes of one rank's micro batch of a Megatron-Core model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.float8 import Float8Recipe
from zeroplan.engines.megatron.float8 import QuantizedOperands
from zeroplan.engines.megatron.operators import Linear, Norm
from zeroplan.models.megatron import MegatronModel

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one rank's micro batch, in bytes unless said otherwise.

    Attributes:
        model: Megatron's arguments.
        micro_batch: samples.
        seq: tokens of a sample on this rank, which context parallelism shares.
        tp: ranks that share each matrix.
        sequence: whether they share the tokens between matrices, too.
        element: bytes of one element of the model's dtype.
        flash: whether attention is one kernel that keeps no scores.
        cudnn: whether that kernel is cuDNN's (``FusedAttention``) and not FlashAttention's.
        ep: ranks that share the experts.
        etp: ranks that share each expert's matrices.
        cp: ranks that share each sample's tokens.
        eight: how operands of the layers' products are quantised; None for products of 16 bits.
    """

    model: MegatronModel
    micro_batch: int
    seq: int
    tp: int = 1
    sequence: bool = False
    element: int = 2
    flash: bool = True
    cudnn: bool = False
    ep: int = 1
    etp: int = 1
    cp: int = 1
    eight: QuantizedOperands | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the micro batch on this rank, before tensor-parallel ranks share them."""
        return self.micro_batch * self.seq

    @property
    def whole(self) -> int:
        """Hidden states of all tokens."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def hidden(self) -> int:
        """Hidden states between the matrices."""
        return self.whole // self.tp if self.sequence else self.whole

    @property
    def query(self) -> int:
        """Queries of this rank's heads."""
        return self.tokens * self.model.kv_channels * self.model.num_attention_heads // self.tp * self.element

    @property
    def context(self) -> int:
        """What attention makes of this rank's heads."""
        return self.tokens * self.model.value_channels * self.model.num_attention_heads // self.tp * self.element

    @property
    def rows(self) -> int:
        """Tokens between the matrices, a number."""
        return self.tokens // self.tp if self.sequence else self.tokens

    @property
    def key(self) -> int:
        """Keys of this rank's groups, and as large their values."""
        return self.tokens * self.model.kv_channels * self.groups * self.element

    @property
    def heads(self) -> int:
        """Heads of this rank, a number."""
        return self.model.num_attention_heads // self.tp

    @property
    def groups(self) -> int:
        """Groups of heads that share keys and values, on this rank, a number."""
        return max(1, self.model.num_query_groups // self.tp)

    @property
    def scores(self) -> int:
        """Scores of all pairs of tokens in this rank's heads."""
        return self.micro_batch * self.heads * self.seq * self.seq * self.element

    @property
    def norm(self) -> Norm:
        """The norm of a hidden state."""
        return self.norm_of(self.model.hidden_size, self.rows)

    def norm_of(self, channels: int, rows: int) -> Norm:
        """Return the norm of so many rows of so many channels."""
        return Norm(channels * self.element, self.model.normalization == "LayerNorm", rows * _FP32)

    def head_norm(self, heads: int) -> Norm:
        """Return the norm of each of so many heads."""
        return self.norm_of(self.model.kv_channels, self.tokens * heads)

    def column(self, out: int, width: int, *, bias: bool, adds: bool) -> Linear:
        """Return a column-wise layer from `width` to `out` channels of all ranks together."""
        local = out // self.tp
        return Linear(
            (local, width),
            self.tokens * local * self.element,
            bias=local * self.element if bias else 0,
            adds_bias=adds,
            gathers=self.tokens * width * self.element if self.sequence else 0,
            fused=self.model.gradient_accumulation_fusion,
            engine=self.model.uses_engine,
            keeps=self.model.uses_engine,
            element=self.element,
            eight=self.eight,
        )

    def whole_linear(self, out: int, width: int) -> Linear:
        """Return a layer that every tensor-parallel rank has whole, for the tokens between the matrices."""
        sizes = self.column(out * self.tp, width, bias=False, adds=False)
        return replace(sizes, output=self.rows * out * self.element, gathers=0)

    def row(self, out: int, width: int, *, bias: bool, kept: bool = False) -> Linear:
        """Return a row-wise layer; who calls it adds the bias. `kept`: another operator keeps its input anyway."""
        whole = self.tokens * out * self.element
        return Linear(
            (out, width // self.tp),
            whole,
            bias=out * self.element if bias else 0,
            scatters=whole // self.tp if self.sequence else 0,
            fused=self.model.gradient_accumulation_fusion,
            engine=self.model.uses_engine,
            keeps=self.model.uses_engine,
            element=self.element,
            eight=self.eight,
            original=kept and self.eight is not None and self.eight.recipe is not Float8Recipe.DELAYED,
        )
