"""``DeepSpeedTransformerLayer``: a transformer layer with DeepSpeed's parameters, arguments and memory flags."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan_runtime.kernels.philox import Dropout
from zeroplan_runtime.techniques.transformer.attention import attend, usable_mask
from zeroplan_runtime.techniques.transformer.config import DeepSpeedTransformerConfig
from zeroplan_runtime.techniques.transformer.functions import LayerFlags, OutputAndFeedForward, Projections

_WHERE = "DeepSpeedTransformerLayer"
#: The stream of dropout of probabilities; the residual sums have 0 and 1.
_PROBABILITIES = 2


class DeepSpeedTransformerLayer(nn.Module):
    """A layer of BERT's kind, with norms before or behind attention and feed-forward part.

    Parameters: ``attn_qkvw`` [3 · hidden, hidden] and ``attn_qkvb`` of query, key and value, ``attn_ow`` and ``attn_ob`` of
    attention's output, ``attn_nw`` and ``attn_nb`` of the norm between the parts, ``inter_w`` and ``inter_b``, ``output_w`` and
    ``output_b`` of the feed-forward part, ``norm_w`` and ``norm_b`` of the first (pre-LN) or last norm (post-LN).

    Args:
        config: what the layer is like; it is copied.
        initial_weights: of query, key, value, attention's output, its norm, the feed-forward part's two and the other norm.
        initial_biases: of the same eight.

    Raises:
        BadInput: for a config that no layer can have.
    """

    layer_id: ClassVar[int] = 0

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[torch.Tensor] | None = None,
        initial_biases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        nn.Module.__init__(self)  # and not what comes next in a class that is a model's layer, too
        config.require_valid()
        self.config = copy.copy(config)
        self.config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        if config.local_rank >= 0 and torch.cuda.is_available():
            torch.cuda.set_device(config.local_rank)
        hidden, inter = config.hidden_size, config.intermediate_size
        self.attn_qkvw = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.attn_qkvb = nn.Parameter(torch.empty(3 * hidden))
        self.attn_ow = nn.Parameter(torch.empty(hidden, hidden))
        self.attn_ob = nn.Parameter(torch.empty(hidden))
        self.attn_nw = nn.Parameter(torch.empty(hidden))
        self.attn_nb = nn.Parameter(torch.empty(hidden))
        self.inter_w = nn.Parameter(torch.empty(inter, hidden))
        self.inter_b = nn.Parameter(torch.empty(inter))
        self.output_w = nn.Parameter(torch.empty(hidden, inter))
        self.output_b = nn.Parameter(torch.empty(hidden))
        self.norm_w = nn.Parameter(torch.empty(hidden))
        self.norm_b = nn.Parameter(torch.empty(hidden))
        self.init_transformer_weights(config.adjust_init_range)
        for given, names in ((initial_weights, _WEIGHTS), (initial_biases, _BIASES)):
            if given is not None:
                self._take(given, names)
        self.train(config.training)

    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draws weights anew, with biases of 0 and norms of 1; with `adjust_init_range` those of outputs are smaller."""
        deviation = self.config.initializer_range
        outputs = deviation / math.sqrt(2.0 * self.config.num_hidden_layers) if adjust_init_range else deviation
        for weight, std in (
            (self.attn_qkvw, deviation),
            (self.attn_ow, outputs),
            (self.inter_w, deviation),
            (self.output_w, outputs),
        ):
            weight.normal_(mean=0.0, std=std)
        for bias in (self.attn_qkvb, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b):
            bias.zero_()
        for weight in (self.attn_nw, self.norm_w):
            weight.fill_(1.0)

    @torch.no_grad()
    def _take(self, given: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        if len(given) != 8:
            raise BadInput(f"{len(given)} initial tensors", where=_WHERE, remedy="give eight: query, key, value and five more")
        getattr(self, names[0]).copy_(torch.cat([each.detach() for each in given[:3]]))
        for name, tensor in zip(names[1:], given[3:], strict=True):
            getattr(self, name).copy_(tensor.detach())

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        layer_head_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor]:
        """Returns the output [samples, tokens, hidden]; a tuple of it with ``return_tuple``.

        Args:
            hidden_states: [samples, tokens, hidden].
            attention_mask: [samples, 1 or heads, 1 or tokens, tokens]: numbers that are added to scores, or bool, True where
                a score counts.
            head_mask: not supported, as those that follow.
            layer_head_mask: not supported.
            encoder_hidden_states: not supported.
            encoder_attention_mask: not supported.
            past_key_value: not supported.
            output_attentions: not supported.
            grads: not supported: read ``.grad``.
            **others: what transformers' encoders tell their layers beside these; of it a cache is refused.

        Raises:
            BadInput: for what is not supported, and hidden states of another width or in another dtype.
        """
        for name, value in (
            ("head_mask", head_mask),
            ("layer_head_mask", layer_head_mask),
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
            ("past_key_value", past_key_value),
            ("past_key_values", others.get("past_key_values")),
            ("output_attentions", output_attentions or None),
            ("grads", grads),
        ):
            if value is not None:
                raise BadInput("it is not supported", where=f"{_WHERE}: {name}", remedy="leave it out")
        hidden, params = self._cast(hidden_states)
        mask = usable_mask(attention_mask, hidden.dtype)
        device = hidden.device.type
        with torch.autocast(device if device != "meta" else "cpu", enabled=False):
            if torch.compiler.is_compiling() or not hidden.numel():  # nothing to compute: no kernel of ours is launched
                out = self._by_compiler(hidden, mask, params)
            else:
                out = self._by_functions(hidden.contiguous(), mask, params)
        return (out,) if self.config.return_tuple else out

    def _cast(self, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the hidden states and the parameters in the dtype that the layer computes in."""
        params: dict[str, torch.Tensor] = dict(self.named_parameters())
        own = self.attn_qkvw.dtype
        dtype = self.config.dtype or _autocast_dtype(hidden.device.type)
        if hidden.dim() != 3:
            raise BadInput(
                f"hidden states of {hidden.dim()} dimensions", where=_WHERE, remedy="give them as [samples, tokens, hidden]"
            )
        if hidden.shape[-1] != self.config.hidden_size:
            raise BadInput(
                f"hidden states of width {hidden.shape[-1]}, where hidden_size is {self.config.hidden_size}",
                where=_WHERE,
                remedy="make them equal",
            )
        target = own if dtype is None else dtype
        if target is not own and own is not torch.float32:
            raise BadInput(f"parameters in {own} cannot be used in {dtype}", where=_WHERE, remedy="leave fp16 and bf16 out")
        if target is own and hidden.dtype is not own:
            raise BadInput(
                f"hidden states in {hidden.dtype} and parameters in {own}",
                where=_WHERE,
                remedy="cast one of them, or set fp16 or bf16 in the config",
            )
        return hidden.to(target), {name: param.to(target) for name, param in params.items()}

    def _by_functions(self, hidden: torch.Tensor, mask: torch.Tensor | None, params: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer with backwards of its own, which keep what the flags say."""
        config = self.config
        hidden_ratio, ratio = (self._ratio(each) for each in (config.hidden_dropout_ratio, config.attn_dropout_ratio))
        fused = config.fused_attention and hidden.device.type != "cpu"
        flags = LayerFlags(
            heads=config.heads,
            eps=config.layer_norm_eps,
            pre_norm=config.pre_layer_norm,
            invertible=config.normalize_invertible,
            gelu_checkpoint=config.gelu_checkpoint,
            approximate=config.gelu_approximate,
            ratio=hidden_ratio,
            salt=config.seed,
        )
        # From torch's generator, so that torch.manual_seed repeats a run and checkpointing a forward.
        seed = None
        if hidden_ratio or (ratio and not fused):
            seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=hidden.device)
        dropout = Dropout(ratio, seed, config.seed, _PROBABILITIES) if ratio and seed is not None else None
        first = (params["norm_w"], params["norm_b"]) if config.pre_layer_norm else (None, None)
        last = (None, None) if config.pre_layer_norm else (params["norm_w"], params["norm_b"])
        query, key, value, residual = Projections.apply(hidden, params["attn_qkvw"], params["attn_qkvb"], *first, flags)
        recompute = config.attn_dropout_checkpoint
        context = attend(query, key, value, mask, ratio, dropout, fused=fused, recompute=recompute)
        del query, key, value
        middle = (params[name] for name in _MIDDLE)
        found: torch.Tensor = OutputAndFeedForward.apply(context, residual, *middle, *last, seed, flags)
        return found

    def _by_compiler(self, hidden: torch.Tensor, mask: torch.Tensor | None, params: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer in torch's own operations, which ``torch.compile`` fuses; it decides itself what is kept. They also take
        no samples or no tokens.
        """
        config = self.config
        shape, eps = (config.hidden_size,), config.layer_norm_eps
        first, between = (params["norm_w"], params["norm_b"], eps), (params["attn_nw"], params["attn_nb"], eps)
        ratio = self._ratio(config.hidden_dropout_ratio)
        samples, tokens, _ = hidden.shape
        rows = functional.layer_norm(hidden, shape, *first) if config.pre_layer_norm else hidden
        made = functional.linear(rows, params["attn_qkvw"], params["attn_qkvb"])
        made = made.view(samples, tokens, 3, config.heads, config.hidden_size // config.heads)
        query, key, value = (made[:, :, i].transpose(1, 2) for i in range(3))
        context = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self._ratio(config.attn_dropout_ratio)
        )
        context = context.transpose(1, 2).reshape(hidden.shape)
        summed = hidden + functional.dropout(functional.linear(context, params["attn_ow"], params["attn_ob"]), ratio)
        normed = functional.layer_norm(summed, shape, *between)
        inner = functional.linear(normed, params["inter_w"], params["inter_b"])
        active = functional.gelu(inner, approximate=config.gelu_approximate)
        product = functional.dropout(functional.linear(active, params["output_w"], params["output_b"]), ratio)
        if config.pre_layer_norm:
            return summed + product
        return functional.layer_norm(normed + product, shape, *first)

    def _ratio(self, given: float) -> float:
        return max(0.0, given) if self.training else 0.0

    def extra_repr(self) -> str:
        """Returns what distinguishes the layer."""
        config = self.config
        norms = "pre" if config.pre_layer_norm else "post"
        return f"hidden_size={config.hidden_size}, heads={config.heads}, {norms}-LN"


def _autocast_dtype(device: str) -> torch.dtype | None:
    """Autocast's dtype where it is on; a plan's trace answers for the meta device, which knows none."""
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:  # a device without autocast
        return None


#: The parameters that take initial weights and biases, in their order.
_WEIGHTS = ("attn_qkvw", "attn_ow", "attn_nw", "inter_w", "output_w", "norm_w")
_BIASES = ("attn_qkvb", "attn_ob", "attn_nb", "inter_b", "output_b", "norm_b")
#: The parameters between the attention and the last norm.
_MIDDLE = ("attn_ow", "attn_ob", "attn_nw", "attn_nb", "inter_w", "inter_b", "output_w", "output_b")
