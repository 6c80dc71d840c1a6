"""The Hugging Face Hub, through `huggingface_hub`: adapters come from there by name, folders go there."""

from pathlib import Path
from typing import Any

from wide.data.local_names import is_path, is_repository, missing_folder
from wide.errors import AdapterError, first_line
from wide.models.card import CARD_FILE, PLACE

ADAPTER = "adapter"
# What wide, PEFT and transformers write for others to load; what is pickled is left behind.
_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".model", ".txt"}


def find_adapter(name: str, *, token: str | bool | None = None, cache_dir: str | Path | None = None) -> Path:
    """Return the folder of an adapter: the one named, the one inside a run's folder, or a copy of the Hub's.

    `name` is a path, or `user/name` or `user/name@revision` of the Hub. Without a token the one that is logged in
    counts. Raises AdapterError if the Hub does not answer or does not give it.
    """
    if (Path(name) / ADAPTER).is_dir():
        return Path(name) / ADAPTER
    repository, _, revision = name.partition("@")
    if Path(name).exists() or not is_repository(repository) or is_path(repository):
        return Path(name)
    wrong = missing_folder(repository, cache=cache_dir)
    if wrong is not None:
        raise AdapterError(wrong)
    from huggingface_hub import snapshot_download

    wanted = ["wide_*", "lora/*", CARD_FILE]
    try:
        options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "allow_patterns": wanted}
        return Path(snapshot_download(repository, revision=revision or None, **options))
    # The hub's library has many errors, and in each version others.
    except Exception as error:
        raise AdapterError(f"no adapter {name!r} can be had from the Hub: {first_line(error)}") from error


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload with wide",
) -> str:
    """Upload the files of a folder in one commit, with the repository's name in the card; arguments of `push_to_hub`.

    Raises AdapterError if the Hub does not answer or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _SUFFIXES]
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        operations = []
        for path in files:
            card = (
                path.read_text(encoding="utf-8").replace(PLACE, repository).encode() if path.name == CARD_FILE else None
            )
            operations.append(CommitOperationAdd(path.relative_to(folder).as_posix(), card or path))
        commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    except Exception as error:
        raise AdapterError(f"the Hub did not take {folder} as {repo_id!r}: {first_line(error)}") from error
    return str(commit.commit_url)
