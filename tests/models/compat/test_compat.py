"""Tests of the import hooks: what can be imported in a process of its own, and what is not imported."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.compat import cuda_builds

QWEN_IMPORTS = """
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLProcessor, Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers import Qwen2_5_VLForConditionalGeneration
"""


def run_python(code: str, cwd: Path) -> str:
    """Return the output of `code` in a fresh interpreter that starts in `cwd`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installing_the_hooks_imports_no_torch(tmp_path: Path) -> None:
    code = "import models, sys; print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    assert run_python(code, tmp_path).strip() == "[]"


def test_torch_free_modules_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import models.layout.parallel, models.registry, models.qwen2_5_vl.recipe, sys;"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert run_python(code, tmp_path).strip() == "False False"


@pytest.mark.parity
def test_plain_vllm_imports_the_hooks_by_its_entry_point(tmp_path: Path) -> None:
    if not cuda_builds.torch_is_cpu_only():
        pytest.skip("only a CPU torch needs the hooks")
    # vLLM calls platform plugins when it first asks for its platform; our code is not imported by hand here.
    code = "from vllm.platforms import current_platform; assert current_platform.device_type == 'cpu'\n"
    code += QWEN_IMPORTS + "from vllm.model_executor.models import qwen2_5_vl"
    run_python(code, tmp_path)


@pytest.mark.parametrize("is_cpu_only", [True, False])
def test_packages_for_cuda_are_hidden_and_repaired_beside_a_torch_for_cpus_alone(
    is_cpu_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = SimpleNamespace(modules={}, meta_path=[])
    monkeypatch.setattr(cuda_builds, "sys", fresh)
    monkeypatch.setattr(cuda_builds, "torch_is_cpu_only", lambda: is_cpu_only)
    monkeypatch.setattr(cuda_builds, "needs_cuda", lambda package: True)
    cuda_builds.install()
    cuda_builds.install()
    assert fresh.modules == (dict.fromkeys(cuda_builds.HIDDEN) if is_cpu_only else {})
    assert len(fresh.meta_path) == is_cpu_only


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    foreign = tmp_path / "elsewhere" / "models"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("")
    check = "from yatt_mm.preflight.packages import check_packages_are_ours as check\n"
    run_python(check + "check()", tmp_path)
    hide = f"import sys; sys.path.insert(0, {str(foreign.parent)!r})\n"
    report = "try:\n    check()\nexcept ImportError as error:\n    print(error)\n"
    assert str(foreign) in run_python(hide + check + report, tmp_path)
