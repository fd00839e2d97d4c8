"""Damage to files, drawn from a seed: flipped bits, cut ends, values of other types, numbers at the edge of their type.

Every function takes the content of a file and a `random.Random`, and returns other content. The same seed gives the
same bytes.
"""

from __future__ import annotations

import copy
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

# Written into the JSON text as they are: what json.dumps itself cannot or would not write.
RAW = (
    "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5000, "-0", "1E400", '"\\ud800"', '"\\u0000"',
    "[" * 200 + "]" * 200, "[" * 20_000 + "]" * 20_000, '{"a":' * 150 + "1" + "}" * 150, "[" * 50_000, "tru", "'x'",
    "0x10", "01", "1.", '"\t"',
)  # fmt: skip
EDGES = (
    None, True, False, 0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    10**30, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-320, 1e308, -1e308, 1e16, "", " ", "a", "0", "1", "1e308", "nan", "inf", "-1",
    "\u0000", "\u202e", "\ufeff", "é" * 40, "😀", "x" * 300, "y" * 5000, "../../etc/passwd", "/dev/zero", "~root/x",
    "a/" * 200, "{}", "{i}", "{0.__class__}", "%s%n", "<b>", "(a+)+$", "(.*)*x", "[", "*", "F32", "BF16", "rotary",
    [], {}, [[]], [None], [0], [1, 2], ["a"], {"": None}, {"a": 1}, [2**62, 2**62], [-1], [0, 2**63],
)  # fmt: skip
MARK = "\x1araw\x1a"  # stands in a tree for one of RAW until the tree is text


# --- bytes ------------------------------------------------------------------------------------------------------------
def flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_end(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def cut_out(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start + rng.choice((1, 2, 4, 8, 100)) :]


def insert(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    piece = rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"[", b"{", b'"', b"\n", b"9" * 30, b"\x00" * 64, b",", b": "))
    return content[:start] + piece + content[start:]


def splice(content: bytes, rng: random.Random) -> bytes:
    """A piece of the content written over another place."""
    if len(content) < 2:
        return content + b"\0"
    size = rng.randrange(1, min(64, len(content)))
    source, target = (rng.randrange(len(content) - size + 1) for _ in range(2))
    return content[:target] + content[source : source + size] + content[target + size :]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    """A number at the edge of its type, as binary formats store lengths and offsets."""
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice((0, 1, -1, 2 ** (8 * width - 1) - 1, -(2 ** (8 * width - 1)), rng.getrandbits(8 * width - 1)))
    piece = value.to_bytes(width, rng.choice(("little", "big")), signed=True)
    start = rng.randrange(max(1, len(content) - width + 1))
    return content[:start] + piece + content[start + width :]


BYTES = (flip, flip, cut_end, cut_out, insert, splice, overwrite)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = rng.choice(BYTES)(content, rng)
    return content


def mutate_lines(content: bytes, rng: random.Random) -> bytes:
    """Text: lines doubled, removed, exchanged; separators put where none were."""
    if rng.random() < 0.4:
        return mutate_bytes(content, rng)
    lines = content.split(b"\n")
    for _ in range(rng.choice((1, 2, 3))):
        here, there = rng.randrange(len(lines)), rng.randrange(len(lines))
        way = rng.randrange(6)
        if way == 0:
            lines[here:here] = [lines[there]] * rng.choice((1, 2, 50))
        elif way == 1 and len(lines) > 1:
            del lines[here]
        elif way == 2:
            lines[here], lines[there] = lines[there], lines[here]
        elif way == 3:
            lines[here] = json.dumps(_edge(rng), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        elif way == 4:
            lines[here] = insert(lines[here], rng)
        else:
            lines[here] = lines[here].replace(
                rng.choice((b",", b"\t", b" ", b'"', b":")), rng.choice((b"", b"\t", b",,"))
            )
    return b"\n".join(lines)


# --- JSON -------------------------------------------------------------------------------------------------------------
def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Other values, keys and types in the tree; sometimes the text itself."""
    if rng.random() < 0.2:
        return mutate_bytes(content, rng)
    return tree_text(mutate_tree(json.loads(content), rng), rng).encode("utf-8", "surrogatepass")


NUMBERS = (-1, 0, 1, 2, 3, 5, 7, 10**6, 2**31)
SHARES = (0.0, -1.0, 0.3, 2.0, 1e-30, 1e30)


def mutate_values(content: bytes, rng: random.Random) -> bytes:
    """Other values of the same types, which a check of types lets through."""
    tree = json.loads(content)
    if rng.random() < 0.2 or not isinstance(tree, dict):
        return mutate_json(content, rng)
    for key in rng.choices(list(tree), k=rng.choice((1, 1, 2))):
        value = tree[key]
        if isinstance(value, bool) or value is None:
            tree[key] = rng.choice((True, False, None))
        elif isinstance(value, (int, float)):
            tree[key] = rng.choice(NUMBERS if isinstance(value, int) else SHARES)
        elif isinstance(value, str):
            tree[key] = rng.choice([one for one in tree.values() if isinstance(one, str)] + ["none", "gelu_new", ""])
        else:
            tree[key] = mutate_tree(value, rng)
    return tree_text(tree, rng).encode("utf-8", "surrogatepass")


def tree_text(tree: Any, rng: random.Random) -> str:
    text = json.dumps(tree)
    quoted = json.dumps(MARK)
    while quoted in text:
        text = text.replace(quoted, rng.choice(RAW), 1)
    if rng.random() < 0.03 and '":' in text:  # a key twice
        text = text.replace("{", '{"' + rng.choice(text.split('":')[:-1]).rsplit('"', 1)[-1] + '": 0, ', 1)
    return text


def _edge(rng: random.Random) -> Any:
    """A copy: it may be changed in its turn."""
    return copy.deepcopy(rng.choice(EDGES))


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    holder = [tree]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(holder, rng)
    return holder[0]


def _change(holder: list[Any], rng: random.Random) -> None:
    """One change somewhere below: deeper places are as likely as shallow ones."""
    where: Any = holder
    key: Any = 0
    while isinstance(where[key], (dict, list)) and where[key] and rng.random() < 0.8:
        where = where[key]
        key = rng.choice(list(where)) if isinstance(where, dict) else rng.randrange(len(where))
    value = where[key]
    way = rng.randrange(12)
    if way <= 3:
        where[key] = _edge(rng)
    elif way == 4:
        where[key] = MARK
    elif way == 5 and where is not holder:
        del where[key]
    elif way == 6:
        where[key] = rng.choice(([value], {"value": value}, [value, 1], str(value), {str(key): value}))
    elif way == 7 and isinstance(where, dict):
        where[str(_edge(rng))] = where.pop(key)
    elif way == 8 and isinstance(where, dict):
        where[str(rng.choice(("extra", "", "a" * 200, "__metadata__", "\u0000", "../x")))] = _edge(rng)
    elif way == 9 and isinstance(value, list):
        where[key] = rng.choice((value[:-1], value[::-1], [*value, _edge(rng)], json.loads(json.dumps(value * 20))))
    elif way == 10 and isinstance(value, (int, float)) and not isinstance(value, bool):
        where[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9, float(value), value / 3))
    elif isinstance(value, str):
        where[key] = _other_text(value, rng)
    else:
        where[key] = _somewhere(holder[0], rng)


def _other_text(value: str, rng: random.Random) -> str:
    """Text that is JSON itself is changed inside: metadata of safetensors files is such text."""
    if value[:1] in ("{", "[") and rng.random() < 0.9:
        try:
            return tree_text(mutate_tree(json.loads(value), rng), rng)
        except (ValueError, RecursionError):
            pass
    place = rng.randrange(len(value) + 1)
    return rng.choice(
        (value[:place], value[place:], value[:place] + rng.choice("\0\n.{}[]()*+\\é😀\ud800") + value[place:])
    )


def _somewhere(tree: Any, rng: random.Random) -> Any:
    """A copy of another part of the tree."""
    while isinstance(tree, (dict, list)) and tree and rng.random() < 0.8:
        tree = tree[rng.choice(list(tree))] if isinstance(tree, dict) else rng.choice(tree)
    return json.loads(json.dumps(tree))


def mutate_jsonl(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_lines(content, rng)
    lines = content.splitlines()
    here = rng.randrange(len(lines))
    lines[here] = mutate_json(lines[here], rng)
    return b"\n".join(lines) + rng.choice((b"\n", b""))


# --- YAML -------------------------------------------------------------------------------------------------------------
YAML = (
    b"&a [*a]", b"*nothing", b"!!python/object:os.system", b"!!binary x", b"<<: *a", b"- - - - -", b"? [a]: b", b"|",
    b"2024-01-01", b"1e3", b".inf", b".nan", b"0o17", b"0x" + b"f" * 400, b"12:30:45", b"~", b"[" * 300, b"{a: " * 300,
    b"- " * 200, b"%YAML 1.1\n---", b"...", b"---", b"\t", b"@", b"`", b'"\\x00"', b"!!set {a}", b"!!int 'x'",
    b"!!float ''", b">", b"!!timestamp 1", b"&x x", b"!!omap []", b"!!merge <<", b"= : 1",
)  # fmt: skip


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    """The tree as flow YAML, or pieces of YAML's own in the text."""
    import yaml

    way = rng.random()
    if way < 0.5:
        documents = [mutate_tree(tree, rng) for tree in yaml.safe_load_all(content)]
        return "\n---\n".join(tree_text(tree, rng) for tree in documents).encode("utf-8", "surrogatepass")
    if way < 0.7:
        return mutate_lines(content, rng)
    lines = content.split(b"\n")
    here = rng.randrange(len(lines))
    key, colon, _ = lines[here].partition(b": ")
    piece = rng.choice(YAML)
    lines[here] = key + colon + piece if colon and rng.random() < 0.7 else lines[here] + b" " + piece
    return b"\n".join(lines)


def mutate_yaml_head(content: bytes, rng: random.Random) -> bytes:
    """The front matter of a README.md."""
    _, head, rest = content.split(b"---\n", 2)
    return b"---\n" + mutate_yaml(head, rng) + b"\n---\n" + rest


# --- safetensors ------------------------------------------------------------------------------------------------------
def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header's tree, with a length that fits it; else bytes anywhere, or the values."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    way = rng.random()
    if way < 0.15:
        return mutate_bytes(content, rng)
    if way < 0.3:
        return content[: 8 + size] + _other_values(data, rng)
    header = mutate_json(header, rng)
    if rng.random() < 0.5:
        header += b" " * (-len(header) % 8)
    data = data + b"\0" * rng.choice((0, 0, 0, 1, 8)) if rng.random() < 0.9 else b""
    return len(header).to_bytes(8, "little") + header + data


def _other_values(data: bytes, rng: random.Random) -> bytes:
    """Tensors with infinities, NaN, zeros or other bits, and as long as before."""
    if len(data) < 8:
        return data
    start = rng.randrange(len(data) // 8) * 8
    piece = rng.choice((b"\0" * 8, b"\xff" * 8, b"\0\0\0\0\0\0\xf0\x7f", b"\0\0\x80\x7f" * 2, rng.randbytes(8)))
    count = rng.choice((1, 1, 4, (len(data) - start) // 8))
    return (data[:start] + piece * count + data[start + 8 * count :])[: len(data)]


# --- archives ---------------------------------------------------------------------------------------------------------
def mutate_zip(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return mutate_bytes(content, rng)
    members = _zip_members(content)
    _change_members(members, rng)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name.replace("\0", "")), data)
    return made.getvalue() if rng.random() < 0.8 else mutate_bytes(made.getvalue(), rng)


def mutate_tar(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return mutate_bytes(content, rng)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [[member.name, archive.extractfile(member).read()] for member in archive]  # type: ignore[union-attr]
    _change_members(members, rng)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w" + rng.choice(("", ":gz")), format=rng.choice((0, 1, 2))) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name[:90])
            entry.size = len(data)
            entry.type = rng.choice(
                (tarfile.REGTYPE,) * 8 + (tarfile.SYMTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
            )
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue() if rng.random() < 0.8 else mutate_bytes(made.getvalue(), rng)


def _zip_members(content: bytes) -> list[list[Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [[name, archive.read(name)] for name in archive.namelist()]


def _change_members(members: list[list[Any]], rng: random.Random) -> None:
    member = rng.choice(members)
    way = rng.randrange(5)
    if way == 0:
        member[0] = rng.choice(("../up.png", "/root.png", "a" * 80 + ".png", "test/x.png", "é/😀.png", "", "x", ".png"))
    elif way == 1:
        member[1] = mutate_bytes(member[1], rng)
    elif way == 2:
        members.remove(member)
    elif way == 3:
        members.append([member[0], b""])
    else:
        member[1] = b"\0" * rng.choice((0, 1, 1000, 200_000))


# --- our own pages and journals ---------------------------------------------------------------------------------------
def mutate_page(content: bytes, rng: random.Random) -> bytes:
    """The record that is embedded in a page, or bytes anywhere."""
    before, opening, rest = content.partition(b'id="record">')
    record, closing, after = rest.partition(b"</script>")
    if rng.random() < 0.4 or not closing:
        return mutate_bytes(content, rng)
    return before + opening + mutate_json(record, rng).replace(b"<", b"\\u003c") + closing + after
