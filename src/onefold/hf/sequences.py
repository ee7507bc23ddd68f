"""onefold.hf.cut_sequences(): a causal model of transformers that attends over sequences cut over ranks.

Its attention is a function registered with transformers' own attention interface, under the name "onefold_sequence",
and its forward cuts each batch first: labels are shifted, positions and documents numbered, in the whole sequence.
The model's code stays as it is. What the function cannot compute exactly raises, and names the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onefold import ConfigError, ModelError, cut_sequence, sequence_attention, token_mean
from onefold.comm.mesh import Mesh
from onefold.parallel.token_mean import sequence_mean
from onefold.parallel.whole_sequence import whole_sequence

ModelT = TypeVar("ModelT", bound=nn.Module)
NAME = "onefold_sequence"  # in transformers' attention interface
STATE = "_onefold_sequences"  # attribute of modules
LAYERS = {"full_attention", "sliding_attention"}
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "cache")  # of attention functions' arguments
IGNORED = -100
POSITIONS = "onefold_position_ids"  # in a batch for cut_sequence(): positions that do not number documents
ROUTER = (
    "adds a loss of its router (output_router_logits=True), which needs whole sequences; set output_router_logits to "
    'False, or use a mesh without the axis "sequence"'
)
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")  # of TRL's fused head


class Cut:
    """The mesh that cuts a model's sequences; copies of the model have the same one."""

    def __init__(self, mesh: Mesh, heads: int) -> None:
        self.mesh = mesh
        self.balanced = heads % mesh.size(_names(mesh).index("sequence")) != 0  # attention is by the ring
        self.documents = False  # the forward that runs was given documents
        self.prepared = False  # by an Accelerator: what a loop makes a loss or metrics of is of whole sequences
        self.logits = False  # logits are wanted beside the loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self


def cut_sequences(model: ModelT, mesh: Mesh) -> ModelT:
    """Let a causal model of transformers attend over sequences that are cut over the mesh axis "sequence", in place;
    returns `model`. Then shard it over the same mesh.

    From now on every rank of one sequence gives the model the same batch of whole sequences, and computes its stretch:
    `input_ids`, `labels`, and where there are any `attention_mask` (batch, tokens) for padding, or `position_ids` that
    start again with each packed document; see `onefold.cut_sequence`. The loss is the mean over all labels of all
    ranks, the same number on each, or, given `num_items_in_batch`, the sum over the sequences of this rank by it;
    logits are those of the stretch. Caches and generate() are unsupported. `onefold.hf.Accelerator` and `Trainer` call
    it for their models.

    >>> import torch, transformers, onefold.hf
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    >>> onefold.init()
    >>> mesh = onefold.mesh(sequence=1)
    >>> model = onefold.hf.cut_sequences(transformers.LlamaForCausalLM(config), mesh)
    >>> model = onefold.shard(model, stage=3, mesh=mesh)
    >>> tokens = torch.ones(1, 9, dtype=torch.long)
    >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"cut_sequences(mesh={mesh!r}): give a torch DeviceMesh, as onefold.mesh(sequence=2) makes one"
        )
    if "sequence" not in _names(mesh):
        return model  # an axis of one rank, which onefold.mesh leaves out
    base = getattr(model, "get_base_model", None)
    causal: Any = base() if callable(base) else model
    _check(causal)
    causal.set_attn_implementation(NAME)
    heads = getattr(causal.config.get_text_config(), "num_attention_heads", None)
    state = Cut(mesh, heads if isinstance(heads, int) else 0)
    for module in causal.modules():
        module.__dict__[STATE] = state
    causal.forward = MethodType(_cut_forward(causal), causal)  # a method: copies of the model get their own
    return model


def cut_prepared(model: nn.Module, mesh: Mesh) -> None:
    """cut_sequences() for an Accelerator: what loops compute losses and metrics of is of whole sequences, on each rank.
    Models that are none of transformers' are left alone: they call sequence_attention() themselves."""
    base = getattr(model, "get_base_model", None)
    causal: Any = base() if callable(base) else model
    if not isinstance(causal, PreTrainedModel):
        return
    if STATE not in causal.__dict__:
        cut_sequences(model, mesh)
    causal.__dict__[STATE].prepared = True


@contextmanager
def logits_wanted(model: nn.Module, on: bool) -> Iterator[None]:
    """Inside, a prepared model whose sequences are cut gives whole logits beside its loss."""
    found = {id(one.__dict__[STATE]): one.__dict__[STATE] for one in model.modules() if STATE in one.__dict__}
    for state in found.values():
        state.logits = on
    try:
        yield
    finally:
        for state in found.values():
            state.logits = False


def _names(mesh: Mesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _check(causal: Any) -> None:
    """Raises if the model's attention cannot be replaced, or is of a kind that reads tokens in another way."""
    name = type(causal).__name__
    if not isinstance(causal, PreTrainedModel) or STATE in causal.__dict__:
        found = "was given to it before" if STATE in getattr(causal, "__dict__", {}) else "is none"
        raise ModelError(f"cut_sequences() is for causal models of transformers, and {name} {found}")
    for part_name, part in causal.named_modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            own = (inner for inner, one in part.named_modules() if type(one).__name__.endswith("Attention"))
            where = next(own, "its attention")
            raise ModelError(
                f"the attention of {part_name or 'the model'} ({type(part).__name__}) cannot be replaced: {where} does "
                f'not use transformers\' attention interface; use a mesh without the axis "sequence"'
            )
    _check_head(causal)
    config = causal.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if kinds or causal.config.is_encoder_decoder or getattr(config, "is_causal", True) is False:
        what = f"layers of the kind {', '.join(sorted(kinds))}" if kinds else "attention that is not causal"
        raise ModelError(
            f"{name} has {what}, and cut_sequences() knows causal attention, with and without sliding windows; use a "
            f'mesh without the axis "sequence"'
        )


def _check_head(causal: Any) -> None:
    """Raises unless the model's loss, if it has one, is that of the next token and of nothing else."""
    name, known = type(causal).__name__, set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    classes = [base.__name__ for base in type(causal).__mro__]
    next_token = any(base in known or base.endswith(("ForCausalLM", "ForConditionalGeneration")) for base in classes)
    if "labels" in inspect.signature(causal.forward).parameters and not next_token:
        raise ModelError(
            f"{name} has another loss than that of the next token, and cut_sequences() shifts labels for that one; use "
            f'a mesh without the axis "sequence"'
        )
    if getattr(causal.config.get_text_config(), "output_router_logits", False):
        raise ModelError(f"{name} {ROUTER}")
    for where, part in causal.named_modules():
        if where.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            raise ModelError(
                f"{where} of {name} counts positions from padding_idx + 1 and leaves padding out, which "
                f'cut_sequences() does not; use a mesh without the axis "sequence"'
            )


def _as_transformers(given: dict[str, Any]) -> dict[str, Any]:
    """The batch for cut_sequence(). transformers packs documents by positions only where it is given no mask, so with a
    mask the positions go under another name."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or positions is None or positions.dim() > 2:
        return given
    rest = {name: value for name, value in given.items() if name != "position_ids"}
    return {**rest, POSITIONS: positions.reshape(-1, positions.shape[-1]).expand(mask.shape[0], -1)}


def _cut_forward(causal: Any) -> Any:
    """The forward of the model, as a function of the model, on this rank's stretch."""
    own = causal.forward
    method = isinstance(own, MethodType) and own.__self__ is causal
    places = list(inspect.signature(own).parameters)

    @wraps(own.__func__ if method else own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, state = MethodType(own.__func__, self) if method else own, self.__dict__[STATE]
        given = {**dict(zip(places, args, strict=False)), **kwargs}
        if given.get("past_key_values") is not None:
            raise ConfigError(
                "a model whose sequences are cut over ranks keeps no cache of keys; for generate() load its weights "
                "into a plain model"
            )
        items, settings = given.pop("num_items_in_batch", None), _settings(given)
        if settings.get("output_router_logits"):
            raise ModelError(f"{type(self).__name__} {ROUTER}")
        cut = cut_sequence(_as_transformers(given), state.mesh, balanced=state.balanced)
        if POSITIONS in cut:
            cut["position_ids"] = cut.pop(POSITIONS)
        targets: Tensor | None = cut.get("shift_labels")
        if targets is not None:
            cut |= {"labels": targets, "num_items_in_batch": 1}  # the sum of the losses
        state.documents = "documents" in cut
        output = run(**cut, **settings, use_cache=False)
        if targets is not None:
            total = output[0]  # the loss, as in all models of transformers
            if items is None:
                loss = token_mean(total, (targets != IGNORED).sum(), state.mesh)
            else:  # those of the sequences that this rank was given, or of all ranks, as the loop counts
                loss = sequence_mean(total, items, state.mesh)
            output = _with(output, 0, "loss", loss)
        return _whole(output, state, given, targets is not None) if state.prepared else output

    return forward


def _whole(output: Any, state: Cut, given: dict[str, Any], labelled: bool) -> Any:
    """The output of a forward with what losses and metrics are made of, of whole sequences: logits, if there is no loss
    or they are wanted beside it, and what TRL's fused head gives of each token."""
    tokens = (given["input_ids"] if "input_ids" in given else given["inputs_embeds"]).shape[1]
    if getattr(output, "log_probs", None) is not None:
        targets = tokens if "shift_labels" in given else tokens - 1  # as in one process, where the last token has none
        for name in PER_TOKEN:
            if isinstance(output.get(name), Tensor):
                output[name] = whole_sequence(output[name], state.mesh, targets, balanced=state.balanced)
        return output
    place = 1 if labelled else 0
    logits = output[place] if isinstance(output, tuple) else output.get("logits")
    if not isinstance(logits, Tensor) or (labelled and not state.logits):
        return output
    return _with(output, place, "logits", whole_sequence(logits, state.mesh, tokens, balanced=state.balanced))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out what is no tensor of the batch."""
    names = [name for name, value in given.items() if not isinstance(value, Tensor)]
    found = {name: given.pop(name) for name in names}
    return {name: value for name, value in found.items() if value is not None and name != "use_cache"}


def _with(output: Any, place: int, name: str, value: Tensor) -> Any:
    """The output of a model with another loss or other logits."""
    if isinstance(output, tuple):
        return (*output[:place], value, *output[place + 1 :])
    setattr(output, name, value)
    return output


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    documents: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    state: Cut | None = module.__dict__.get(STATE)
    if state is None:
        _refuse(module, "was made, or chose its attention, without cut_sequences()")
    odd = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if odd or attention_mask is not None:
        _refuse(module, f"asks for {odd[0] if odd else 'a mask'} in its attention")
    if dropout:
        _refuse(module, f"drops attention weights out (p = {dropout:g}; set the model's dropout of attention to 0)")
    if state.documents and documents is None:
        _refuse(module, "was not passed the documents of packed or padded sequences by the model")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = sequence_attention(
        query, key, value, state.mesh, causal=causal, documents=documents, window=sliding_window, scale=scaling,
        balanced=state.balanced,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, use_vmap: bool = False, **kwargs: Any) -> None:
    """No mask: attention masks by positions and documents. A model that adds to the causal mask is refused."""
    if use_vmap:
        raise ModelError(
            "cut_sequences() knows causal attention, with and without sliding windows, and this model changes the "
            'causal mask (tokens that see later ones, for instance); use a mesh without the axis "sequence"'
        )


def _refuse(module: nn.Module, what: str) -> NoReturn:
    where = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    raise ModelError(f'{where} {what}, which attention over cut sequences ("sequence") does not have')


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
