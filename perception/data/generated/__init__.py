"""Procedurally drawn road scenes with exact labels of lanes, or of signs: endless data without a download."""

from perception.data.generated.render import (
    DEFAULT_STYLE,
    SCENE_STYLES,
    GeneratedScenes,
    render_scene,
    scene_truth,
)
from perception.data.generated.sign_render import SIGN_RENDERER_VERSION, render_sign_scene

__all__ = [
    "DEFAULT_STYLE",
    "SCENE_STYLES",
    "SIGN_RENDERER_VERSION",
    "GeneratedScenes",
    "render_scene",
    "render_sign_scene",
    "scene_truth",
]
