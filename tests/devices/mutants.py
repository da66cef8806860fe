"""Forgotten devices, one by one: each mutant takes a `.to(...)` or a `device=` out of relax_hpc, and its work must notice.

A mutant is a line's text with its change in «»: «old→new», or «old», which is taken out. Functions are given the changed
code in place, so that whoever imported them runs it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple


class Mutant(NamedTuple):
    backend: str
    work: str
    """The piece of work that must notice."""
    module: str
    text: str


TORCH: dict[str, dict[str, list[str]]] = {
    "trainers.torch": {
        "grpo, recomputed": [
            "targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64))«.to(self.device)»",
            "column = torch.zeros(len(rollouts.tokens)«, device=self.device»)",
            "column[torch.from_numpy(batch.targets)«.to(self.device)»]",
            "return cast(NDArray[np.float32], column«.cpu()».numpy())",
            'tensor.detach().to(«"cpu", »self.dtype if tensor.is_floating_point()',
            "loaded: PreTrainedModel = model«.to(device)».eval()",
            'return torch.device("«cuda", torch.cuda.current_device()→cpu"»)',
        ],
        "grpo, bfloat16": ['return torch.autocast(«self.device.type→"cpu"», torch.bfloat16,'],
        "opd": ['load_model(recipe.models_held[TEACHER_KEY], «self.device→torch.device("cpu")»)'],
        "ppo": ["return Critic(cast(PreTrainedModel, body))«.to(self.device)».eval()"],
        "critic": ["Learning(Critic(body)«.to(self.device)».eval(), recipe.trainer)"],
        "scorer": [
            'self.models[name] = load_model(folder, «self.device→torch.device("cpu")»).requires_grad_(False)',
            'self.models[name] = unfilled(config, torch.float32, «self.device→torch.device("cpu")»)',
        ],
    },
    "trainers.forward": {
        "grpo, recomputed": [
            "input_ids=torch.from_numpy(batch.tokens)«.to(device)»",
            "position_ids=torch.from_numpy(batch.positions)«.to(device)»",
            "[torch.from_numpy(at)«.to(device)»]",
            "probe = torch.arange(4«, device=model.device»)[None]",
        ],
        "grpo, prompts shared": ["torch.from_numpy(batch.attention_mask())«.to(device)»"],
        "grpo, turns shared": ["(torch.from_numpy(index)«.to(targets.device)» for index in"],
        "ppo, bfloat16": ['with torch.autocast(«device.type→"cpu"», enabled=False):'],
    },
    "trainers.trees.attention": {"grpo, turns shared": ["-torch.inf, dtype=like.dtype«, device=like.device»)"]},
    "trainers.token_loss": {
        "grpo, recomputed": [
            "values[torch.from_numpy(targets)]«.to(self.device)»",
            "lengths=torch.from_numpy(np.diff(begins, append=len(samples)))«.to(self.device)»",
            "peak = torch.tensor([name.endswith(PEAK) for name in values]«, device=table.device»)",
        ],
        "ppo": ["(column[torch.from_numpy(targets)]«.to(self.device)» for column in"],
        "gmpo": ["torch.from_numpy(values[first])«.to(self.device)»"],
    },
    "algorithms.common.sequences": {"gspo": ["torch.arange(len(lengths)«, device=lengths.device»)"]},
    "trainers.optim": {"warm start": ["dtype=bucket[0].dtype«, device=bucket[0].device»)"]},
    "trainers.host_copies": {
        "checkpoint": [
            "torch.empty(0, dtype=torch.uint8«, device=storage.device»).set_(storage)",
        ]
    },
    "trainers.state_files": {
        "checkpoint": [
            "{kind: value«.to(parameter.device)» for kind, value",
            'states[f"{rank}/cuda"] = «torch.cuda.get_rng_state(device)→torch.get_rng_state()»',
            '«torch.cuda→torch».set_rng_state(tensors[f"{rank}/cuda"]«, device»)',
        ]
    },
    "files.tensor_files": {"checkpoint": ["tensor.detach()«.cpu()».contiguous().reshape(-1)"]},
    "huggingface": {
        "engine, one batch": ["Module.to(model, «device→'cpu'»).eval()"],
        "media, qwen3_vl": ["torch.from_numpy(array)«.to(device)» for name"],
    },
    "engines.torch_model": {
        "engine, one batch": [
            "weight.shape[0], dtype=torch.bool«, device=self.device»",
            "torch.tensor([place[key] for key in keys]«, device=self.device»)",
            "for tokens, _ in distinct.values()]«, device=self.device»)",
            "visible = torch.arange(limit«, device=self.device»)",
            "torch.from_numpy(a[..., rows, :])«.to(self.device)»",
            "torch.from_numpy(following)«.to(self.device)»",
            "causal = torch.ones(width, width, dtype=torch.bool«, device=self.device»)",
            "torch.eye(width, dtype=torch.bool«, device=self.device»)",
        ],
    },
    "engines.torch": {
        "engine, one batch": [
            "with «device→contextlib.nullcontext()»:",
            "generator = torch.Generator(«self.device»).manual_seed(seed)",
            "rows=torch.arange(len(of)«, device=self.device»)",
            "alive=torch.ones(len(of), dtype=torch.bool«, device=self.device»)",
            "room=torch.tensor(room«, device=self.device»)",
            'out.tokens.to(«"cpu", »torch.int32).numpy()',
            "out.logprobs«.cpu()».numpy()",
        ],
        "engine, offloaded": ["tensor.untyped_storage().resize_(«size→0»)"],
    },
    "engines.torch_stream": {
        "engine, a stream": [
            "with «device→torch.no_grad()»:",
            "uniform=torch.from_numpy(uniform)«.to(device)»",
            "numbers = (torch.tensor(rows«, device=self._model.device»)",
            "self._state.select(torch.tensor(rows«, device=self._model.device»))",
            'tokens=tokens.to(«"cpu", »torch.int32).numpy()',
            "logprobs=logprobs«.cpu()».numpy()",
            "torch.arange(cache.end«, device=self._model.device»)",
            "torch.arange(len(self._rows)«, device=logits.device»)",
        ]
    },
    "engines.slots": {
        "engine, a stream": [
            "rows = torch.arange(len(at)«, device=at.device»)",
            "columns = torch.arange(width«, device=lengths.device»)",
            "index = torch.tensor(rows«, device=self.lengths.device»)",
            "enumerate(rows) if place != row]«, device=index.device»)",
        ]
    },
    "engines.kv_cache": {
        "engine, one batch": [
            "«x.new_empty→torch.empty»(self.rows, x.shape[1], room, x.shape[3])",
            "«x.new_empty→torch.empty»(count, x.shape[1], room or x.shape[2], x.shape[3])",
        ]
    },
    "engines.sampling": {"engine, one batch": ["if «weights.is_cuda→False»:"]},
    "engines.stops": {"engine, stopped": ["torch.tensor(candidates«, device=device»)"]},
}
MEGATRON: dict[str, dict[str, list[str]]] = {
    "trainers.megatron.split": {
        "grpo, recomputed": [
            "targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64))«.to(self.device)»",
            "column = torch.zeros(len(rollouts.tokens)«, device=self.device»)",
            "column[torch.from_numpy(batches[number].targets)«.to(self.device)»]",
            "return column«.cpu()».numpy()",
        ]
    },
    "trainers.megatron.packing": {
        "grpo": [
            "torch.from_numpy(np.ascontiguousarray(array))«.to(device)»",
            "torch.from_numpy(np.cumsum([0, *lengths])).to(«device, »torch.int32)",
            "chosen >= 0)\n    to = partial(_tensor, «device=device→device=torch.device('cpu')»)",
            ".append(i)\n    to = partial(_tensor, «device=device→device=torch.device('cpu')»)",
        ]
    },
    "trainers.megatron.layers": {
        "grpo": [
            'device = "cpu" if «config.use_cpu_initialization→True» else torch.cuda.current_device()',
            "eps=eps, dtype=config.params_dtype«, device=device»)",
        ]
    },
    "trainers.megatron.export.weights": {"grpo": ['tensor.to(«"cpu", »dtype, copy=True)']},
}
MUTANTS = [
    Mutant(backend, work, f"relax_hpc.{module}", text)
    for backend, table in (("torch", TORCH), ("megatron", MEGATRON))
    for module, works in table.items()
    for work, texts in works.items()
    for text in texts
]
FOR_RANKS = Mutant(
    "megatron",
    "checkpoint",
    "relax_hpc.trainers.megatron.checkpoint.moments",
    "whole = torch.zeros(parameter.numel()«, device=parameter.device»)",
)
"""One that two processes notice: NCCL would be given a tensor on the host."""
PLACES = re.compile(r"\.to\((?=\"cpu\"|(\w+\.)?device)|\bdevice=|\.cpu\(\)")
"""Where a device is said."""
UNNOTICED = {
    "self.axes = torch.tensor(axes, device=device)": "no work shows Megatron-core media yet",
    "torch.arange(0, size, 2, device=device).float()": "no work shows Megatron-core media yet",
    "places=torch.from_numpy(order[local[mine]]).to(device)": "no work shows Megatron-core media yet",
    "features=torch.from_numpy(features[mine]).to(device)": "no work shows Megatron-core media yet",
    "self.to(device).model.eval()": "no work shows Megatron-core media yet",
    "loss_of(number, *said), torch.zeros((), dtype=torch.int, device=self.device)": "Megatron leaves this count alone",
    "dtype=instead.dtype, device=instead.device)": "the model is moved whole, later",
    "torch.tensor([[1, side, side]], device=like.device)": "no work shows Megatron-core media yet",
    "data = whole.view(parameter.shape).cpu() if writes else": "the writer of a checkpoint copies to the host itself",
    "else torch.empty(parameter.shape, device=META)": "a place without values",
    "_placed(place, key, torch.empty(parameter.shape, device=device))": "filled by copies",
    "torch.empty(count, dtype=bucket[0].dtype, device=device)": "received from other ranks by NCCL alone",
    "~numbers.isfinite().cpu().numpy()": "where a user's own algorithm computed on the GPU",
    "on_cpu = tensor.cpu()": "trainers export to the host",
    'torch.empty_like(whole, device="cuda")': "the process that speaks NCCL is not simulated",
}
"""Text around a place that no work notices without it -> why."""
CHANGE = re.compile("«([^«»→]*)(?:→([^«»]*))?»")


def unlisted(module: str, source: str) -> list[str]:
    """Lines of a module with a place that neither a mutant changes nor UNNOTICED explains."""
    known = []
    for mutant in (mutant for mutant in [*MUTANTS, FOR_RANKS] if mutant.module == module):
        begin = source.index(CHANGE.sub(r"\1", mutant.text))
        taken = 0  # «, » and what comes instead are not in the source
        for change in CHANGE.finditer(mutant.text):
            at = begin + change.start() - taken
            known.append((at, at + len(change[1])))
            taken += len(change[0]) - len(change[1])
    known += [(at, at + len(text)) for text in UNNOTICED if (at := source.find(text)) >= 0]
    missing = [
        place.start()
        for place in PLACES.finditer(source)
        if not any(begin <= place.end() and place.start() < end for begin, end in known)
    ]
    return [source[:at].rpartition("\n")[2] + source[at:].partition("\n")[0] for at in missing]


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Run this block with the mutant's code in place."""
    module = importlib.import_module(mutant.module)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    old, new = CHANGE.sub(r"\1", mutant.text), CHANGE.sub(lambda found: found[2] or "", mutant.text)
    assert source.count(old) == 1, f"{mutant.module} has this {source.count(old)} times, not once: {old}"
    before, after = (functions(text, module.__file__) for text in (source, source.replace(old, new)))
    [(name, code)] = [(name, code) for name, code in after.items() if code != before[name]]
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    function = inspect.unwrap(found)  # type: ignore[arg-type]
    kept = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = kept


def functions(source: str, file: str) -> dict[str, CodeType]:
    """The code of a module's functions and methods, by qualified name."""
    found: dict[str, CodeType] = {}

    def look(code: CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                if constant.co_flags & inspect.CO_NEWLOCALS:
                    found[constant.co_qualname] = constant
                else:  # a class
                    look(constant)

    look(compile(source, file, "exec"))
    return found
