"""Templates of random bodies that hold other statements or effects. `random_idioms.py` says what `$B` and the others are."""

FLOW = """
if $yn:
    $B
else:
    $B

if $no:
    $B
elif $yes:
    $B

$no and $do

$yes and $do

$yes or $do

$no or $do

$do if $no else None

$do if $yes else None

3 < 2 < ($do or 5)

1 < 2 < ($do or 5)

assert $yes, $do

all([$no, $do])

all($a for $a in ($no, $do))

($do, $k)[1]

{"a": lambda: $do}["a"]()

{"a": lambda: $do}.get("b", list)()

[$do for _ in range($i)]

[*map(lambda _: $do, range(2))]

map(lambda _: $do, range(2))

($do for _ in range(2))

next(($do for _ in range(3)), None)

$a = [lambda: $do, lambda: None]
$a[$i % 2]()

try:
    $B
except ValueError:
    $B
else:
    $B
finally:
    $B

try:
    $B
    check($yn)
    $B
except OwnError:
    $B

try:
    $B
    check($no, "why")
    $B
except OwnError as $a:
    out.append(str($a))
    $B
finally:
    $N

try:
    try:
        [].pop()
    except IndexError as $a:
        raise OwnError("again") from $a
    $B
except OwnError as $a:
    out.append(type($a.__cause__).__name__)
    $B

def $f():
    try:
        return $v.mul_($k)
    finally:
        $v.add_(1)
$f()
$B

with contextlib.suppress(KeyError):
    $B
    {}["x"]
    $B

with np.testing.assert_raises(ValueError):
    raise ValueError
    $B

with Swallow(ZeroDivisionError, then=$v):
    $B
    1 / 0
    $B

with grown($v, $k) as $a, contextlib.nullcontext($w) as $b:
    $a += $b
    $B

for $a in range($i):
    $N

$a = 0
while $a < $i:
    $a += 1
    $N
    if $a == 2:
        break
else:
    $B

for l in ($L, $M, $P):
    $Q

for l in range($L, $M):
    $Q

for l, $v in (($L, $v), ($M, $w)):
    $Q

l = $L
while True:
    $Q
    if (l := l + 1) >= $M:
        break

def $f(l, m=model):
    m.layers_output[l] += $v
    return l + 1
$f($f($L))

def $f($args):
    $B
$f()

def $f(l, $args):
    $Q
[$f(l) for l in ($L, $M)]

def $f(l, $args):
    if l > $M:
        return 0
    $Q
    return 1 + $f(l + 1)
out.append($f($L))

match ($i, "x"):
    case (0 | 1, "x"):
        $B
    case ($a, _) if $a > 2:
        $B
    case _:
        $B

for $a in (1, 2, 3):
    if $a == $i:
        break
else:
    $B

@functools.wraps(add)
def $f(*$a, **$b):
    return add(*$a, **$b)
$f(model, $L, v=$v)
"""
