"""Builds the kernels for the CPU. Without a compiler, or without OpenMP, the installation does without them;
MEMNORM_KERNELS=off leaves them out on purpose. A wheel records the commit that it was built from.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ["memnorm/kernels/cpu.cpp"]
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "memnorm/kernels").glob("*.h"))
GCC = ["-O3", "-std=c++17", "-fno-math-errno", "-fvisibility=hidden"]


class BuildKernels(build_ext):
    """Tries to build with OpenMP, then for one thread, then not at all."""

    def build_extension(self, extension: Extension) -> None:
        flags = ["/O2", "/std:c++17"] if self.compiler.compiler_type == "msvc" else GCC
        parallel = ["/openmp"] if self.compiler.compiler_type == "msvc" else ["-fopenmp"]
        for extra in (parallel, []):
            extension.extra_compile_args = flags + extra
            extension.extra_link_args = [] if self.compiler.compiler_type == "msvc" else extra
            try:
                return super().build_extension(extension)
            except Exception as error:
                print(f"memnorm: no kernels with {extension.extra_compile_args}: {error}", file=sys.stderr)
        return None


class BuildModules(build_py):
    """Adds the commit, which an installed copy cannot ask git for."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            commit = runpy.run_path(str(ROOT / "memnorm/lab/commit.py"))
            (Path(self.build_lib) / commit["RECORD"]).write_text(f"{commit['commit_of'](ROOT) or ''}\n")


KERNELS = Extension(
    "memnorm.kernels._cpu", SOURCES, depends=HEADERS, language="c++", py_limited_api=True, optional=True
)
setup(
    ext_modules=[] if os.environ.get("MEMNORM_KERNELS", "").lower() == "off" else [KERNELS],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildModules},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
