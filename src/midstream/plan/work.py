"""Work: what a plan costs the requests that share its steps, counted before the plan runs; and how much of it a step may have.

`plan.checking` counts the work of a program, and `plan.strangers` that of a plan. `Rates` turn work into seconds on a kind of device. The
rates and weights are upper bounds, measured on one core of a CPU and on an H200. `tests/gpu/check_work.py` measures them, and looks
for the plan that costs most for its work.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from midstream.plan import fields

STEP_SECONDS = 0.08  # of all plans from HTTP in one step: a neighbour waits less than 100 ms longer
MAX_PLAN_STEPS = 1 << 12  # operations in all programs of a plan from HTTP
MAX_PLAN_ITEMS = 1 << 16  # numbers, texts, lists and dicts in these programs
BEGIN_SECONDS = 60e-6  # to read, compile and load an edit, once
WRITE_SECONDS = 4e-4  # to write the program of a probe or a gated edit, once
PLACE_SECONDS = 2e-4  # to put a program into the tables of a GPU, once for each layer
CHECK_SECONDS = 4e-5  # to check an operation of a program in the engine, once
GRAPH_ROWS = 512  # the most rows of a CUDA graph, which runs its programs on all of them
DEFAULT_WIDTH = 1 << 12  # the width of a site if the plan does not say it
KEPT_ROW = 1e3  # weighted numbers that cost as much as keeping one row of a capture
_PER_LAUNCH = 8  # tensors that an operation takes or returns, beyond the first ones, that cost as much as one launch
_FIRST_TENSORS = 4
_IN_A_ROW = 4096  # numbers along an axis that cost as much as one launch where they are computed one after another
_WEIGHT = 2.0  # of a number that an operation reads or writes
READ_WEIGHT = 0.25  # of a number of a matrix that all rows share
# The weights of slower operations: sorting, selection, and arithmetic with denormal or infinite numbers.
_WEIGHTS = {
    256.0: "cumsum cumprod cummax cummin logcumsumexp",  # a GPU computes them one number after another along all axes but the last
    128.0: "logit",
    64.0: "sort argsort std var",
    32.0: "topk kthvalue median floor_divide remainder fmod div_mode sinc sqrt erfinv digamma",
    16.0: """
        gelu logsumexp tan sin cos log log2 log10 asinh acosh asin acos atan lgamma erfc pow mish tanh xlogy exp argmax argmin sinh cosh
    """,
    4.0: """
        erf softplus atanh celu elu selu log_sigmoid_forward logaddexp logaddexp2 heaviside aminmax expm1 atan2 hypot log1p div
        count_nonzero max min any all index index_put index_select embedding gather scatter scatter_add _log_softmax _softmax log_softmax
        softmax sigmoid silu trunc square where amin amax flip roll prod norm linalg_vector_norm
    """,
}
_WEIGHT_OF = {name: weight for weight, names in _WEIGHTS.items() for name in names.split()}
# The launches of operations that cost more than one: some have several kernels; indexing operations have their indices clamped before;
# for `var` and `std`, PyTorch may warn about the variance of a single number.
_LAUNCHES = {
    2: "nansum slice_scatter select_scatter isinf isposinf isneginf native_layer_norm copysign",
    3: "isfinite where count_nonzero gather scatter scatter_add index index_put index_select embedding",
    4: "sort argsort topk kthvalue median",
    5: "var std",
    6: "logsumexp",
}
_LAUNCHES_OF = {name: launches for launches, names in _LAUNCHES.items() for name in names.split()}
_ONE_AFTER_ANOTHER = frozenset(
    "sort argsort topk kthvalue median cummax cummin cumsum cumprod logcumsumexp argmax argmin max min prod".split()
)


class Rates(NamedTuple):
    """The time that a device needs, in seconds.

    Attributes:
        launch: for each operation, without its numbers.
        number: for each number that it reads or writes, times the operation's weight.
        product: for each multiplication of a matrix product.
    """

    launch: float
    number: float
    product: float


RATES: Mapping[str, Rates] = MappingProxyType({"cpu": Rates(14e-6, 1e-9, 1e-10), "cuda": Rates(33e-6, 1e-11, 5e-14)})


class Work(NamedTuple):
    """The work of one run of a program, or of all edits and readings of a plan in one step.

    Attributes:
        launches: operations, results and kernels, whatever their sizes.
        shared: weighted numbers that are read or written once for all rows.
        row: weighted numbers for each row.
        shared_products, products: multiplications of matrix products, once for all rows and for each row.
    """

    launches: float = 0.0
    shared: float = 0.0
    row: float = 0.0
    shared_products: float = 0.0
    products: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*map(operator.add, self, other))

    def times(self, count: float) -> Work:
        return Work(*(count * each for each in self))

    def fixed_seconds(self, device: str) -> float:
        """The seconds in a step that do not depend on its number of rows."""
        rates = rates_of(device)
        return self.launches * rates.launch + self.shared * rates.number + self.shared_products * rates.product

    def row_seconds(self, device: str) -> float:
        """The seconds for each row in a step."""
        rates = rates_of(device)
        return self.row * rates.number + self.products * rates.product


class StepWork(NamedTuple):
    """What a request's plan costs the steps of its engine, in seconds.

    Attributes:
        begin: in the request's first step.
        step: in each step, with `free` rows.
        row: for each further row of the request in a step.
        free: how many rows cost as much as one.
    """

    begin: float = 0.0
    step: float = 0.0
    row: float = 0.0
    free: int = 0


def rates_of(device: str) -> Rates:
    """The rates of a type of device; those of "cuda" for accelerators that nobody has measured."""
    return RATES.get(device, RATES["cuda"])


def weight_of(op: str) -> float:
    """What an operation costs for each number, relative to reading it. `op`: as in `Step.op`."""
    name, _, overload = op.partition(".")
    return _WEIGHT_OF.get(f"{name}_mode" if overload.endswith("_mode") else name, _WEIGHT)


def work_of(op: str, row: float, shared: float, tensors: int, along: int) -> Work:
    """The work of one operation without its multiplications.

    Args:
        row, shared: numbers that it reads and writes, for each row and for all of them. A view counts at its whole size.
        tensors: how many it takes and returns.
        along: the size of the axis along which it computes; 0 for none.
    """
    weight, name = weight_of(op), op.partition(".")[0]
    launches = _LAUNCHES_OF.get(name, 1) + max(tensors - _FIRST_TENSORS, 0) / _PER_LAUNCH
    if name in _ONE_AFTER_ANOTHER:
        launches += along / _IN_A_ROW
    return Work(launches, shared * weight, row * weight)


def product_of(row: float, shared: float, row_products: float, shared_products: float, slower: float) -> Work:
    """The work of a matrix product, whose matrices are read in order.

    Args:
        row, shared: as of `work_of`.
        row_products, shared_products: multiplications for each row and for all of them.
        slower: how many times slower it is than a product of float32.
    """
    return Work(1, shared * READ_WEIGHT, row * _WEIGHT, shared_products * slower, row_products * slower)


def around(width: int) -> Work:
    """The work that a step does around a program: it gathers the rows, compares their values and puts them back."""
    return Work(12, row=6 * width)


def check_size(programs: Mapping[str, Any]) -> None:
    """Raise PlanError for programs in their wire form that would take long to read and check."""
    items, parts, steps = 0, list[Any](programs.values()), 0
    for given in programs.values():
        found = given.get("steps") if isinstance(given, Mapping) else None
        steps += len(found) if isinstance(found, (list, tuple)) else 0
    if steps > MAX_PLAN_STEPS:
        allowed = f"up to {MAX_PLAN_STEPS} over HTTP, all programs together: send fewer programs, or shorter ones"
        raise fields.refuse("the plan", f"programs of {steps} operations", allowed)
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        items += 1
        if items + len(parts) > MAX_PLAN_ITEMS:
            allowed = f"up to {MAX_PLAN_ITEMS} over HTTP: send long lists of numbers as constants"
            raise fields.refuse("the plan", f"programs with over {MAX_PLAN_ITEMS} arguments", allowed)
