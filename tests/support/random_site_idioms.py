"""Templates of random bodies that read and write the model. `random_idioms.py` says what `$v` and the others are."""

READS = """
out.append(save($S))

$h = $S
out.append(save($h))
$h *= $k
out.append($h[0])

out.append($S)

out.append($S[-1])

out.append($S.norm(dim=-1))

$h = $S
out.append(($h @ $v, $h.mean()))

out.append({"x": $S.sum(-1), "n": $i})

out.append(Pair($S[-1], $k))

out.append(Found($S.amax(-1)))

named["$S"] = $S.clone()

out.append(F.cosine_similarity($S, $v, dim=-1))

out.append(($S @ ENCODER).topk(2).values)

$a = [$S.std(-1) for _ in range(2)]
out.append($a[0])

out += [$h.norm() for $h in model.layers_output[$L:$M]]

$a = [model.layers_output[$b][-1] for $b in ($L, $M, $P)]
out.append(torch.stack($a).mean(0))

def $f($a):
    for $b in $a:
        yield model.layers_output[$b].sum(-1)
out.extend($f(($L, $M)))

out.append(model.project_on_vocab($S[-1:]).argmax(-1))
"""

WRITES = """
$h = $S
$h += named.get("before", 0)
named["before"] = 0.1 * $h.mean(0)

$h = save($S)
$h += $v
out.append($h[-1])

$h = $S
out.append($h)
$h += $v

$S += $v

$S -= $k * $v

$S = $S + $v

$S = $S * 0.5

$S = $v + $k * $S

$S /= 1.5

$S += $v.to($S)

$S[:, $col] = $k

$S[$row] = $v

$S[$row] += $v

$S[..., $col] *= $k

$h = $S
$h += $v

$h = $S
$S = $h + $v
out.append($h.sum(-1))

$h = $S * $k
$S = $h
$h += $v

$h = $S
$S = $h - ($h @ unit($v))[:, None] * unit($v)

$S -= ($S @ unit($v))[:, None] * unit($v)

model.steer([$L], $v, $k)

model.steer($L, $v, positions=-1)

add(model, $L, $v)

replace(model, $L, lambda $a: $a * $k)

replace(model, $L, functools.partial(torch.add, other=$v))

$f = $S.mul_
$f(0.5)

$S.clamp_(-$c, $c)

torch.add($S, $v, out=$S)

$S.copy_($S * $k)

$S.masked_fill_($S.abs() > $c, 0)

$S = torch.where(($S @ $v > 0)[:, None], $S, $S + $w)

$S = torch.tanh($S) * $c

$S.transpose(0, 1)[$i] += $k

$S = torch.zeros_like($S) + $v

$S = $S.flip(-1)

$S[[0, -1]] = $v

$S.index_fill_(1, torch.tensor([1, 2]), $k)

for $a in [$S]:
    $a += $v

operator.iadd($S, $v)

operator.setitem($S, -1, $v)

$S += torch.relu($S @ ENCODER) @ DECODER

$S = F.layer_norm($S, (256,)) * $c

$S -= $S.mean(0, keepdim=True)

$S += torch.einsum("th,h->t", $S, unit($v))[:, None]

$h = $S
$h, $a = $h + $v, $h
$S = $h
out.append($a[-1])

$h = $a = $S
$a += $v
out.append($h[0])

for $a, $b in ((model.layers_output, $L), (model.mlps_output, $M)):
    $a[$b] += $v

for $a in ($L, $M, $P):
    model.layers_output[$a] += $v / $a

$a = {$L: $v, $M: $w}
for $b, $t in $a.items():
    $t *= $k
    model.layers_output[$b] += $t

$a = model.layers_output[$L]
model.layers_output[$M] += 0.5 * $a

$a = model.layers_output[$L]
$b = model.layers_output[$M]
$a += 100
$b += $v
out.append(($a[-1], $b[-1]))

model.model.layers[$L].output[0][:] += $v

with grown($v, $k) as $a:
    model.layers_output[$L] += $a

$a = Box(model.layers_output[$L])
$a += $v

$a = Box(model.layers_output[$L])
$a[$row] = $w

model.layers_output[$L] = Box($v) + model.layers_output[$L]

$h = $S
$h *= 0.5
$h[0] = $v

$S.unflatten(-1, (4, 64))[:, $i] = 0

[$a.add_($v) for $a in ($S,)]

for $a in ($L, $M):
    if $a % 2:
        continue
    model.layers_output[$a] *= 0.9

$f = functools.partial(add, model, v=$v)
$v.neg_()
$f($L)

[*map(functools.partial(add, model, v=$v), ($L, $M))]

model.model.layers[$L].mlp.output = torch.tanh(model.model.layers[$L].mlp.output)
"""

# Several changes of one value.
EDITS = """
$h = $S
$E
$E
out.append($h[-1])

$h = $S
$E
$E
$E

$h = $S
$E
$S = $h * $k
$E
$E

$a = $S[-1]
$R
$R
out.append($a)

$a = $S[0]
$R
$R
$R
"""

# What `$E` and `$R` stand for: a change of the value `$h`, which is the site's `$S`, and of its row `$a`.
VALUE_EDITS = """
$h += $v

$h -= $k * $v

$h *= $k

$h[$row] = $v

$h[$row] += $v

$h[$row] *= $k

$h[:, $col] = $k

$h[..., $col] += $k

$h[-1][$col] = $k

$h[0, $col] = $j

$h.add_($v, alpha=$k)

$h.clamp_(-$c, $c)

$h -= ($h @ unit($v))[:, None] * unit($v)

$h.copy_($h * $k)

$h.neg_()

$h[-1].copy_($v)

$h[:1] += $h[-1]

$h = $h + $v

$h = $h.clone()

$S = $h

$S = $h + $v

$S += $v

out.append($h.clone())

out.append(save($h))

out.append($S.sum(-1))
"""
ROW_EDITS = """
$a += $v

$a -= $k * $v

$a *= $k

$a[$col] = $k

$a[$col] += $j

$a.copy_($v)

$a.clamp_(-$c, $c)

$a -= ($a @ unit($v)) * unit($v)

$a.neg_()

$a[:] = $v

out.append($a.clone())

$a = $a.clone()
"""

# What needs numbers of the forward.
VALUES = """
if $S.norm() > 40:
    $B

out.append($S.norm().item())

$a = float($S.mean())
$v.mul_(0.5 if $a > 0 else 2)

out.append($S[-1, :3].tolist())

$a = int($S.abs().sum(0).argmax())
out.append($a)
$v[$a] = 2

out.append(f"{$S.norm():.3f}")

while $S.norm() > 30:
    $S.mul_(0.5)

$S[$S > $c] = 1

$S.numpy()[-1] = $k

out.append(1 if ($S @ $v).sum() > 0 else "no")

($S.sum() > 0) and $do

assert $S.norm() > 0, $do
"""

LAST = """
out.append(model.logits)

out.append(model.logits.argmax(-1))

model.logits[:, $tok] += 50

model.logits = model.logits * $c

out.append(model.samples)

out.append(model.next_token_probs.max())

out.append(model.samples.item())

model.samples[:] = $tok

$h = model.logits
$h[:, :$tok] -= 1
out.append($h.max(-1).values)
"""

ENDINGS = """
check(False, "own: at the end")

raise LookupError("own: raised")

assert $no, "own: asserted"

{}["missing"]

out.append(model.layers_output[0] if $yes else None)

model.layers_output[7] = torch.zeros(3, 5)

tracer.stop()

try:
    tracer.stop()
except Exception:
    $v.mul_(0)
"""
