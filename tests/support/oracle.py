"""The bundled model on plain transformers with torch hooks: what the trace tests compare midstream with.

Nothing of midstream is imported. Which submodule's input or output each site is, is said here by hand, for a Llama.
Generation recomputes the whole sequence for every token, so it shares no KV cache, no padding and no batching with what
it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

Site = tuple[str, int] | str
# The whole sequence's value at the site, [tokens, hidden], to what replaces it.
Edit = Callable[[torch.Tensor], torch.Tensor]

# Of each site: the submodule of the layer, and whether the value is its input or its output.
PER_LAYER = {
    "resid_pre": ("", "input"),
    "attn_in": ("input_layernorm", "output"),
    "attn_z": ("self_attn.o_proj", "input"),
    "attn_out": ("self_attn", "output"),
    "resid_mid": ("post_attention_layernorm", "input"),
    "mlp_in": ("post_attention_layernorm", "output"),
    "mlp_act": ("mlp.down_proj", "input"),
    "mlp_out": ("mlp", "output"),
    "resid_post": ("", "output"),
}
ONCE = {"embed": ("model.embed_tokens", "output"), "final_norm": ("model.norm", "output")}


@dataclass
class Ran:
    """One forward: every site's value `[tokens, ...]`, and the logits `[tokens, vocab]`."""

    sites: dict[Site, torch.Tensor]
    logits: torch.Tensor


class Plain:
    """A transformers model that is read and changed by torch hooks alone."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.heads = self.model.config.num_attention_heads
        self._generated: dict[str, list[int]] = {}

    def ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        (token,) = self.tokenizer(text)["input_ids"]
        return token

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def _point(self, site: Site) -> tuple[torch.nn.Module, str]:
        if isinstance(site, str):
            path, kind = ONCE[site]
            return self.model.get_submodule(path), kind
        inner, kind = PER_LAYER[site[0]]
        layer = self.model.model.layers[site[1]]
        return (layer.get_submodule(inner) if inner else layer), kind

    def run(self, prompt: str | list[int], edits: Mapping[Site, Edit] | None = None) -> Ran:
        """One forward over one prompt. A site is recorded as the model goes on with it: after its edit."""
        every = [*ONCE, *((name, i) for i in range(len(self.model.model.layers)) for name in PER_LAYER)]
        return self._forward(self.ids(prompt), edits, every)

    @torch.no_grad()
    def _forward(self, ids: list[int], edits: Mapping[Site, Edit] | None, wanted: Iterable[Site]) -> Ran:
        sites: dict[Site, torch.Tensor] = {}
        with ExitStack() as stack:
            for site in wanted:
                module, kind = self._point(site)
                hook = self._hook(site, kind, sites, (edits or {}).get(site))
                register = module.register_forward_pre_hook if kind == "input" else module.register_forward_hook
                stack.callback(register(hook, with_kwargs=True).remove)
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return Ran(sites, logits)

    def _hook(self, site: Site, kind: str, sites: dict[Site, torch.Tensor], edit: Edit | None) -> Callable[..., object]:
        def see(value_1TH: torch.Tensor) -> torch.Tensor:
            value = value_1TH[0] if edit is None else edit(value_1TH[0].clone())
            sites[site] = value.unflatten(-1, (self.heads, -1)) if site[0] == "attn_z" else value
            return value[None]

        def before(_: object, args: tuple, kwargs: dict) -> object:
            if args:
                return (see(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": see(kwargs["hidden_states"])}

        def after(_: object, __: tuple, ___: dict, output: object) -> object:
            return (see(output[0]), *output[1:]) if isinstance(output, tuple) else see(output)

        return before if kind == "input" else after

    def generate(
        self,
        prompt: str | list[int],
        count: int,
        edits: Mapping[Site, Edit] | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> list[int]:
        """`count` greedy tokens.

        Args:
            edits: see the whole sequence each time.
            forced: by step, the token that is put instead.
        """
        known = str((prompt, count, forced)) if edits is None else ""
        if known in self._generated:
            return self._generated[known]
        ids, new = list(self.ids(prompt)), []
        for step in range(count):
            token = (forced or {}).get(step)
            if token is None:
                token = int(self._forward(ids, edits, edits or ()).logits[-1].argmax())
            ids, new = [*ids, token], [*new, token]
        if known:
            self._generated[known] = new
        return new


def close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal shapes, and equal values to a tolerance relative to the largest (float32, two libraries)."""
    assert given.shape == expected.shape, (given.shape, expected.shape)
    error = (given.detach().float() - expected.detach().float()).abs().max().item()
    assert error <= tolerance * max(expected.detach().abs().max().item(), 1.0), error


def differs(given: torch.Tensor, expected: torch.Tensor, by: float = 1e-2) -> None:
    """The check above would see an effect of this size."""
    assert (given.detach().float() - expected.detach().float()).abs().max().item() > by
