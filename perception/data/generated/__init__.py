"""Procedurally drawn road scenes with exact lane labels: endless data without a download."""

from perception.data.generated.render import RENDERER_VERSION, GeneratedScenes, render_scene, scene_truth

__all__ = ["RENDERER_VERSION", "GeneratedScenes", "render_scene", "scene_truth"]
