"""Makes platform wheels of what holds machine code, and compiles the operators of a source archive."""

import importlib.util
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "tessera" / "kernels"
HAS_OPERATORS = (KERNELS / "build.py").exists()


class BuildPy(build_py):
    """Takes Python's files, and first sees to the operators that go beside them."""

    def run(self) -> None:
        """Compile where wheels/build.py has put no library: this is a source archive then."""
        if HAS_OPERATORS and not list(KERNELS.glob("lib/*.so")):
            spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
            assert spec is not None
            assert spec.loader is not None
            build_kernels = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(build_kernels)
            build_kernels.build(build_folder=HERE / "build" / "kernels")
        super().run()


class BdistWheel(bdist_wheel):
    """Tags a wheel for every Python 3, as the machine code knows no Python, and adds its bill of materials."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Make the folder .dist-info, with the bills that wheels/build.py has written in sboms/ (PEP 770)."""
        super().egg2dist(egginfo_path, distinfo_path)
        if (HERE / "sboms").exists():
            shutil.copytree(HERE / "sboms", Path(distinfo_path) / "sboms")

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-PLATFORM``, or ``py3-none-any`` without machine code."""
        return ("py3", "none", super().get_tag()[2])


class Distributed(Distribution):
    """Says whether there is machine code, which setuptools knows of extension modules alone."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is of one platform."""
        return HAS_OPERATORS or (HERE / "tessera_rec_server").exists()


setup(distclass=Distributed, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
