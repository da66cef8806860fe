"""The recipe: one TOML file that says all of a run. `schema` and `tables/` hold its models, `load` reads and writes it."""

from relax_hpc.recipe.load import (
    Change,
    Row,
    change_on_resume,
    differences,
    dump_recipe,
    load_recipe,
    resumable,
    site_file,
    sources,
)
from relax_hpc.recipe.paths import with_files, without_folders
from relax_hpc.recipe.problems import RecipeError
from relax_hpc.recipe.schema import Recipe

__all__ = [
    "Change",
    "Recipe",
    "RecipeError",
    "Row",
    "change_on_resume",
    "differences",
    "dump_recipe",
    "load_recipe",
    "resumable",
    "site_file",
    "sources",
    "with_files",
    "without_folders",
]
