"""Builds the kernels for the CPU. Without a compiler, or without OpenMP, the installation does without them;
MEMNORM_KERNELS=off leaves them out on purpose.
"""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ["memnorm/kernels/cpu.cpp"]
HEADERS = [
    f"memnorm/kernels/{name}.h"
    for name in ("tensors", "sets", "layer", "planes", "rows", "record", "work", "calls", "quick")
]
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


KERNELS = Extension(
    "memnorm.kernels._cpu", SOURCES, depends=HEADERS, language="c++", py_limited_api=True, optional=True
)
setup(
    ext_modules=[] if os.environ.get("MEMNORM_KERNELS", "").lower() == "off" else [KERNELS],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
