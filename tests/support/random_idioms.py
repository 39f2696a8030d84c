"""The pieces of random bodies: templates of Python and PyTorch idioms, a blank line apart. `random_bodies.py` puts them together.

| in a template | becomes |
|---|---|
| `$v`, `$w`, `$u` | different vectors `[256]` that the code can use here |
| `$new` | a new vector, for the code that follows |
| `$a`, `$b`, `$f`, `$g`, `$h`, `$s`, `$t`, `$C` | new names |
| `$k`, `$j`, `$c` | numbers; `$c` is positive |
| `$i`, `$n`, `$tok` | integers: 0 to 3, 1 to 200, a token |
| `$row`, `$col` | an index of rows, or of columns |
| `$S` | the next site of the forward; `$L`, `$M`, `$P` the next layers |
| `$yes`, `$no`, `$yn` | an expression that is true, false, or either |
| `$do` | an expression with an effect |
| `$args` | all vectors as parameters with themselves as defaults |
| `$E`, `$R` | a change of a value, or of a row of it |
| `$B`, `$N`, `$Q` | statements; `$N` without sites, `$Q` with `model.layers_output[l]` as the only one |
"""

VECTORS = """
$new = $k * $v

$new = $v.clone()
$new *= $k

$new = $v
$new = $new + $w

$new = $v
$new += $w

$v = $v - $w

$a = [$v, $w]
$a[0].mul_($k)
$new = $a[0] - $a[1]

$a = ($v, $k)
$a[0].add_($a[1])

for $a in ($v, $w):
    $a *= $k

for $b, $a in enumerate(($v, $w), $i):
    $a += $b

for $b, $a in zip(($k, $j), ($v, $w)):
    $a.mul_($b)

$f = $v.mul_
$f($k)

def $f($a, $b=$k):
    $a *= $b
$f($v)

def $f($a, *$b, $c2=$j):
    for $t in $b:
        $a = $a + $c2 * $t
    return $a
$new = $f($v, $w, $v)

def $f($a=$v):
    $a[:$n] = $k
$f()

$f = lambda $a, $b=$v: $b.add_($a)
$f($k)

unit_($v)

$new = scale_($v, $k)

$v[$col] = $k

$v[$v < 0] *= $k

$v.view(4, 64)[$i].fill_($k)

$a, $b = $v.chunk(2)
$a.copy_($b)

$v.numpy()[::3] = $k

$a = $v.numpy()
$a *= $k

torch.mul($v, $k, out=$v)

torch.add($v, $w, alpha=$k, out=$v)

$new = torch.where($v > $w, $v, $k * $w)

$new = torch.stack([$v, $w]).mean(0)

$a = BANK[0]
$a.mul_($k)
$new = BANK.sum(0)

$new = torch.empty(256).copy_($v).clamp_(-1, 1)

if ($new := $v * $k) is not None:
    $new += $w

$a = {"x": $v, "y": $w}
for $b in $a.values():
    $b.sub_($k)
del $a["x"]
$new = $a["y"]

$a = dict(zip(("p", "q"), ($v, $w)))
$a["p"].neg_()

$t = [1, 2, 3]
$new = [$t.pop() for _ in range(2)][-1] * $v
out.append($t)

$s = 0.5
$t = [$s := $s * 2 for _ in range(3)]
$new = $s * $v

$t = []
[$t.append($b * $k) for $b in ($v, $w)]
$new = $t[-1] + len($t)

any(($b := $a) > 1 for $a in (0, 1, 2, 3))
$new = $b * $v

[$a.mul_($k) for $a in ($v, $w)]

list(map(operator.methodcaller("mul_", $k), [$v]))

map(operator.methodcaller("mul_", $k), [$v])

operator.iadd($v, $w)

operator.setitem($v, slice(0, $n), $k)

$new = functools.reduce(operator.add, [$v, $w, $v])

functools.reduce(operator.iadd, [$v, $w, $k])

$f = functools.partial(torch.mul, $v)
$v.neg_()
$new = $f($k)

$new = next(($a for $a in ($v, $w) if $a is not $v), $v)

$new = (lambda $a: $a * 2)($v)

$new = max(($v, $w), key=lambda $a: $k)

$new = sorted([(2, $v), (1, $w)], key=operator.itemgetter(0))[0][1]

*$a, $b = $v, $w, $v + 1
$new = $b - $a[0]

$a, $b = $v, $w
$a, $b = $b, $a
$a += 1
$new = $a

$new = copy.copy($v)
$new.mul_($k)

$new = copy.deepcopy([$v])[0]
$v.add_($k)

$a = np.linspace(-1, 1, 256).astype(np.float32)
$new = torch.from_numpy($a)
$a[$n:] = $k

$new = getattr(torch, "tanh")($v)

$new = $v.double().mul($k).float()

$new = F.normalize($v, dim=0) * 8

$new = torch.einsum("h,h->h", $v, $w).tanh()

$new = $v.roll($n)

$new = torch.cat([$v[:128], $w[128:]])

$new = ($v @ $w) / 256 * $v

$v.masked_fill_($w > 0, $k)

$v.index_fill_(0, torch.tensor([$i, 7]), $k)

$v.lerp_($w, 0.5)

VA.mul_($k)
$new = VA

renew($k)
$new = VC

$new = counted($i) * $v * 0.1

TABLE["a"][0][:$n] = $k
$new = TABLE["a"][0]

ARRAY[:$n] = $k
$new = VB

for $b, $a in PAIRS:
    $a *= $k
$new = PAIRS[1][1]

$new = cached($i) * $v
out.append([*CALLS])

def $f(by=$i):
    nonlocal count
    count += by
    return count
$new = $f() * $v + $f()

$f = [lambda: $a for $a in ($v, $w)]
$new = $f[0]() * $k

def $f($a, $b=[]):
    $b.append($a)
    return len($b)
$f(1), $f(2)
$new = $f(3) * $v

def $f():
    $a = yield $v
    while True:
        $a = yield $a * $v
$g = $f()
next($g)
$new = $g.send($k)

def $g():
    yield from ($v, $w)
    return $k
def $f():
    $a = yield from $g()
    yield $a * $v
*_, $new = $f()

def $f():
    try:
        yield $v
    finally:
        $v.mul_($k)
$g = $f()
$new = next($g)
$g.close()

$a = Box($v)
$a += $w
$new = $a + $k

$a = Box($v)
$a($k)
$a[$col] = $j
$new = $w + Box($a.twice)

$new = (Box($v) and $w) + $k if Box($w) else $v

class $C(Box):
    def __add__(self, other):
        return super().__add__(other) * $k
$new = $C($v) + $w

$f = functools.cached_property
class $C:
    @$f
    def cached(self):
        return $v.mul_($k)
$a = $C()
$new = $a.cached + $a.cached

class $C:
    def __get__(self, owner, kind):
        return $k * owner.v
class $f(Box):
    scaled = $C()
$new = $f($v).scaled

@functools.singledispatch
def $f($a):
    return $v
@$f.register
def _($a: int):
    return $a * $w
$new = $f($i) + $f("x")

@functools.cache
def $f($a):
    return $v.add_($a)
$f($i), $f($i)

def $f($a):
    return $v if $a < 1 else $k * $f($a - 1)
$new = $f($i)

$a = collections.deque(($v, $w, $v * $k), maxlen=3)
$a.rotate($i)
$new = $a.popleft()

$a = collections.defaultdict(lambda: torch.zeros(256))
for $b in "xyx":
    $a[$b] += $v
$new = $a["x"] - $a["z"]

$a = itertools.accumulate(($k, $j, 1.0))
$new = $v * [*itertools.islice($a, 2)][-1]

$a = itertools.cycle(($v, $w))
next($a)
$new = next($a) + next($a)

$a = iter((0.5, 1.0, 2.0))
$b = [*itertools.takewhile(lambda x: x < 1, $a)]
$new = next($a) * $v + len($b)

$a = Found($v, notes=[$k])
$a.notes.append($i)
$a.value *= $a.notes[-1] + 1
$new = dataclasses.replace($a, value=$w).value

$a = Pair($v, $w)
$a.first[$col] += $k
$new = $a._replace(first=$a.second).first

$a = vars(Box($v))
$a["v"] = $w
$new = $a["v"]

with contextlib.ExitStack() as $a:
    $a.callback($v.mul_, $k)
    $new = $v + 1

exec("$v.mul_($k)", {"$v": $v})

match ($i, $v):
    case (0 | 1, $a):
        $new = $a * $k
    case ($b, $a) if $b == 2:
        $new = $a + $b
    case _:
        $new = $w

match {"kind": "x", "by": $k}:
    case {"kind": "x", **$a}:
        $new = $v * $a["by"]
    case _:
        $new = $v
"""

CONDITIONS = {
    "yes": ["True", "$i + 1", "len(PAIRS) == 2", "not FLAG", "NAMES", "$v is not None", "3 > 2 > 1", "'a' in TABLE"],
    "no": ["False", "0", "FLAG", "len(PAIRS) > 5", "None", "''", "$v is None", "not NAMES", "[]", "1 < 0 < 3"],
    "yn": ["COUNT % 2", "$i > 1", "len(out) % 2", "$v.shape[0] > $n", "FLAG or $i", "len(CALLS) > 1"],
}
EFFECTS = {
    True: ["model.steer([$L], $v)", "model.steer($L, $v, $k)", "add(model, $L, $v)", "add(model, $L, $v, k=$k)"],
    False: ["$v.mul_($k)", "scale_($v, $k)", "$v.add_($w)", "out.append($k)", "counted($i)", "unit_($v)", "renew($k)"],
}
