"""Images, video and audio in prompts: a model's own processor sees them once, and engine and trainer get what it made.

value (path, bytes, frames …) ──decode──► picture, frames, sound ──process (the model's processor)──► (tokens, Media)
                                                   families/: how each kind of model takes them
"""
