"""No code of this package turns bytes into objects or code."""

import ast
from pathlib import Path

import pytest

import prefixcache

PACKAGE = Path(prefixcache.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {"torch.load", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "yaml.load"}


def unsafe(source: str) -> list[str]:
    """Name what a module's source uses of the above, with its lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                used = {alias.name.partition(".")[0] for alias in names} & FORBIDDEN_MODULES
            case ast.ImportFrom(module=str(module), names=names):
                imported = {f"{module}.{alias.name}" for alias in names} & FORBIDDEN_CALLS
                used = ({module.partition(".")[0]} & FORBIDDEN_MODULES) | imported
            case ast.Call(func=func):
                used = {ast.unparse(func)} & (FORBIDDEN_BUILTINS | FORBIDDEN_CALLS)
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=value):
                used = set() if ast.unparse(value) == "False" else {ast.unparse(node)}
            case _:
                used = set()
        found += [f"line {getattr(node, 'lineno', '?')}: {name}" for name in sorted(used)]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "def f(x):\n    return torch.load(x, weights_only=True)",
        "eval('1')",
        "exec(code)",
        "np.load(path)",
        "f(allow_pickle=True)",
        "from_pretrained(x, trust_remote_code=flag)",
    ],
)
def test_the_check_itself_finds_each_kind(source: str) -> None:
    assert unsafe(source)


def test_the_check_lets_harmless_names_pass() -> None:
    assert unsafe("model.eval(); re.compile('a'); json.loads(b); f(trust_remote_code=False); torch.compile(g)") == []
