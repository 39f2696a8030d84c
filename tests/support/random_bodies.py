"""Random bodies of traces, made from templates of Python and PyTorch idioms. They know nothing of how midstream runs a body.

    text = source(seed)

The text is a module with a function `body(model, tracer)`. It goes through the sites in the order of the forward, with conditions, loops,
helpers, classes, exceptions and managers around them, and returns what it has read. It has no randomness of its own.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from random_flow_idioms import FLOW
from random_idioms import CONDITIONS, EFFECTS, VECTORS
from random_site_idioms import EDITS, ENDINGS, LAST, READS, ROW_EDITS, VALUE_EDITS, VALUES, WRITES

HEAD = Path(__file__).with_name("random_head.py").read_text()
LAYERS = 8
# The accessors in the order of a layer, and how often each is chosen.
ACCESSORS = ["layers_input[{}]", "attentions_output[{}]", "model.layers[{}].mlp.input", "mlps_output[{}]"]
ACCESSORS += ["model.layers[{}].mlp.output", "layers_output[{}]"]
PLACES = {ACCESSORS[0]: 0, ACCESSORS[1]: 1, ACCESSORS[2]: 2, ACCESSORS[3]: 3, ACCESSORS[4]: 3, ACCESSORS[5]: 4}
OFTEN = [5, 10, 3, 10, 6, 66]
FIRST_LINES = ["for step in tracer.iter[:]:"] * 6 + [
    "for step in tracer.all():",
    "for step in tracer.iter[1:]:",
    "for step in tracer.iter[:2]:",
    "for step in tracer.iter[[0, 2]]:",
    "for step in tracer.iter[1]:",
    "for other, step in enumerate(tracer.iter[:], 5):",
    "for step, other in zip(tracer.iter[:], itertools.cycle((v0, v1))):",
]
FIRST_VECTORS = ["v0, v1 = VA, VB", "v0, v1 = VA.clone(), VB", "v0, v1 = VC, VA * 1"]
RETURNS = [
    "out",
    "out, named, count",
    '{"out": out, "named": named, "vectors": [v0, v1]}',
    "Found(out, [count, v0])",
    "[*out, COUNT]",
]
TABLES = {
    name: [each.strip("\n") for each in text.split("\n\n")]
    for name, text in {
        "vectors": VECTORS, "reads": READS, "writes": WRITES, "values": VALUES, "flow": FLOW, "last": LAST, "endings": ENDINGS,
        "edits": EDITS, "$E": VALUE_EDITS, "$R": ROW_EDITS,
    }.items()
}  # fmt: skip
NUMBERS = {"k": "0.5 -1.5 2.0 -0.25 0.1 -1.0 0.75 3", "j": "-0.5 1.5 0.3 -2", "c": "0.5 2.0 4.0 1.25"}
NEEDS_SITES = re.compile(r"\$(S|L|M|P|Q)\b")


class Writer:
    """Writes one body.

    Attributes:
        scope: the vectors that the code can use here.
        layer, place: the last site that was used, in the order of the forward.
        fixed: the only site that the code may use here; None for the next ones of the forward.
        without_sites: whether the code may use none.
        in_function: whether the code is in a function within the body, where the body's own names cannot be bound.
        in_step: whether the code is in a loop over steps.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = 0
        self.scope = ["v0", "v1"]
        self.layer, self.place = -1, 4
        self.fixed: str | None = None
        self.without_sites = self.in_function = self.in_step = False

    def statements(self, count: int, depth: int = 0) -> list[str]:
        """So many statements, in a scope of their own."""
        kept = len(self.scope)
        lines = [line for _ in range(count) for line in self.statement(depth)]
        del self.scope[kept:]
        return lines

    def statement(self, depth: int) -> list[str]:
        often = {"vectors": 22, "flow": 33 if depth < 2 else 0, "reads": 17, "writes": 20, "edits": 10, "values": 3}
        table = self.rng.choices([*often], often.values())
        return self.write(table[0], depth)

    def write(self, table: str, depth: int = 0) -> list[str]:
        """One statement from a table, or from the vectors' if none fits here."""
        allowed = [each for each in TABLES[table] if self.fits(each)] or TABLES["vectors"][:5]
        known: dict[str, str] = {}
        lines = []
        for line in self.rng.choice(allowed).splitlines():
            indent, word = re.match(r"( *)(.*)", line).groups()
            if word in ("$B", "$N", "$Q"):
                lines += [indent + each for each in self.block(word, depth + 1, "args" in known)]
            elif word in ("$E", "$R"):
                shared = {name: known[name] for name in ("h", "a", "S") if name in known}
                lines.append(indent + self.expand(self.rng.choice(TABLES[word]), shared))
            else:
                lines.append(indent + self.expand(word, known))
        if "new" in known:
            self.scope.append(known["new"])
        return lines

    def fits(self, template: str) -> bool:
        if self.in_function and "count" in template:
            return False
        if self.without_sites:
            return not NEEDS_SITES.search(template) and "model." not in template and "$B" not in template
        if self.fixed is not None:
            return not re.search(r"\$(L|M|P|Q|B)\b", template)
        return LAYERS - 1 - self.layer >= 2 * len(set(NEEDS_SITES.findall(template)))

    def block(self, word: str, depth: int, in_function: bool) -> list[str]:
        before = self.fixed, self.without_sites, self.in_function
        self.without_sites = self.without_sites or word == "$N"
        self.in_function = self.in_function or in_function
        if word == "$Q":
            self.fixed = "model.layers_output[l]"
        lines = self.statements(self.rng.choice((1, 1, 2)), depth)
        self.fixed, self.without_sites, self.in_function = before
        return lines

    def expand(self, line: str, known: dict[str, str]) -> str:
        """The line with what each `$name` stands for: the same within a template."""

        def chosen(match: re.Match[str]) -> str:
            name = match[1]
            if name == "do":
                return self.effect()
            if name not in known:
                known[name] = self.choose(name, known)
            return known[name]

        return re.sub(r"\$(\w+)", chosen, line)

    def effect(self) -> str:
        has_sites = not self.without_sites and self.fixed is None and self.layer < LAYERS - 2
        table = EFFECTS[has_sites and self.rng.random() < 0.6]
        return self.expand(self.rng.choice(table), {})

    def choose(self, name: str, known: dict[str, str]) -> str:
        rng = self.rng
        match name:
            case "v" | "w" | "u":
                taken = [known.get(each) for each in "vwu"]
                return rng.choice([each for each in self.scope if each not in taken] or self.scope)
            case "i":
                return "step" if self.in_step and rng.random() < 0.3 else str(rng.randint(0, 3))
            case "n" | "tok":
                return str(rng.randint(1, 200))
            case "row":
                return rng.choice(["-1", "0", "[0]", "[0, -1]", ":1", "1:", "::2"])
            case "col":
                return rng.choice(["17", ":9", "::4", "[3, 5, 8]", "100:110", "-1"])
            case "L" | "M" | "P":
                return str(self.next_layer())
            case "S":
                return self.fixed or self.next_site()
            case "yes" | "no" | "yn":
                return self.expand(rng.choice(CONDITIONS[name]), dict(known))
            case "args":
                return ", ".join(f"{each}={each}" for each in dict.fromkeys(self.scope))
            case _ if name in NUMBERS:
                return rng.choice(NUMBERS[name].split())
        self.names += 1
        return f"{'v' if name == 'new' else name}{self.names + 1}"

    def next_layer(self) -> int:
        self.layer += self.rng.randint(1, 2)
        self.place = PLACES[ACCESSORS[-1]]
        return self.layer

    def next_site(self) -> str:
        (accessor,) = self.rng.choices(ACCESSORS, OFTEN)
        if PLACES[accessor] <= self.place or self.rng.random() < 0.7:
            self.layer += self.rng.randint(1, 2)
        self.place = PLACES[accessor]
        return "model." + accessor.format(self.layer)

    def steps(self, most: int) -> list[str]:
        """What a loop over the steps does: at most so many statements, and a read at the end."""
        self.layer, self.place, self.in_step = -1, 4, True
        lines = self.write("writes") if self.rng.random() < 0.5 else []
        lines += self.statements(self.rng.randint(1, most))
        lines += (
            self.write("last") if self.rng.random() < 0.5 else [f"out.append(model.layers_output[{LAYERS - 1}][-1])"]
        )
        if self.rng.random() < 0.1:
            lines += ["if step == 1:", "    break"]
        self.in_step = False
        return [f"    {line}" for line in lines]

    def body(self) -> list[str]:
        rng, is_small = self.rng, self.rng.random() < 0.35
        lines = ["out, named, count = [], {}, 0", rng.choice(FIRST_VECTORS)]
        for _ in range(rng.randint(0, 1 if is_small else 3)):
            lines += self.write("vectors")
        if rng.random() < 0.55:
            lines += self.write("writes") if rng.random() < 0.5 else []
            for _ in range(rng.randint(1, 2 if is_small else 5)):
                lines += self.statement(0)
            lines += self.write("last") if rng.random() < 0.3 else [f"out.append(model.layers_output[{LAYERS - 1}])"]
        else:
            before = self.statements(1) if rng.random() < 0.25 else []
            first = "for step in tracer.iter[1:]:" if before and rng.random() < 0.8 else rng.choice(FIRST_LINES)
            lines += [*before, first, *self.steps(1 if is_small else 4)]
        if rng.random() < 0.07:
            lines += self.write("endings")
        return [*lines, f"return {rng.choice(RETURNS)}"]


def source(seed: int) -> str:
    """The module with the body of this number."""
    lines = Writer(random.Random(seed)).body()
    return "\n".join([HEAD, "", "def body(model, tracer):", *(f"    {line}" for line in lines), ""])
