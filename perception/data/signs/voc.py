"""PASCAL VOC: an XML file an image, in Annotations/ beside JPEGImages/ (or annotations/ and images/, or all together).

Corners are inclusive and counted from 1 by tradition; many tools write them 0-based and half-open, so look at what
`data check` says of corners at 0 and past the border. Parts come from ImageSets/Main/{train,val,test}.txt where it is
there; else all images are for training. The classes are those of all XML files, whatever the part, by name.

| in the folder                                       | rule                                                  |
|-----------------------------------------------------|-------------------------------------------------------|
| no object                                           | an image without signs                                |
| difficult = 1                                       | ignored region, as VOC's own evaluation has it, noted |
| no size, or 0 by 0                                  | size from the image's header, noted                   |
| filename that is not there                          | the image of the XML file's own name, noted           |
| image on disk with another suffix                   | used, noted                                           |
| image without XML file                              | left out, noted                                       |
| two XML files of one image                          | UserError                                             |
| broken XML, DOCTYPE (entities), field missing       | UserError with file:line and field                    |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from perception.data.images import find_image
from perception.data.sample import ReadReport
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_number, a_text
from perception.data.signs.listing import check_split, image_name, note_unlisted, read_keys
from perception.errors import MissingListError, UserError

_LABEL_FOLDERS = ("Annotations", "annotations", ".")
_IMAGE_FOLDERS = ("JPEGImages", "images", "Annotations", "annotations", ".")
_LISTS = {"train": "train", "validation": "val", "test": "test"}
_LINE = "line"


@dataclass(frozen=True)
class _Object:
    class_name: str
    corners: Box
    difficult: bool
    where: str


@dataclass(frozen=True)
class _Annotation:
    file_name: str
    size: tuple[int, int] | None
    objects: tuple[_Object, ...]
    path: Path


def is_voc(folder: Path) -> bool:
    return _label_folder(folder) is not None


def read_voc(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "one-based-inclusive",
) -> SignFolder:
    """Images of one part in the order of its list, else of their XML files' names.

    `list_name`, relative to `folder`, is a text file with an image name without suffix a line. Raises UserError for
    what is wrong, with file, line and field; MissingListError where the data set has no such part.
    """
    check_corners(corners)
    label_folder = _label_folder(folder)
    if label_folder is None:
        raise UserError(f"{folder}: no XML file in it or its Annotations/; give the folder that has them")
    report = ReadReport()
    annotations = {path.stem: _read_annotation(path) for path in sorted(label_folder.glob("*.xml"))}
    classes = sorted({sign.class_name for annotation in annotations.values() for sign in annotation.objects})
    if not classes:
        raise UserError(f"{label_folder}: no object in any of {len(annotations)} XML files; there is nothing to learn")
    builder = SignFolderBuilder(folder, tuple(classes))
    builder.report = report
    wanted = _wanted(folder, annotations, split, list_name, report)
    missing = []
    for annotation in wanted:
        where = str(annotation.path)
        name = _find_image(folder, annotation, report)
        if name is None:
            missing.append(annotation)
            if images_required:
                continue
            report.note("image is not there: labels kept", where)
        if annotation.size is None:
            if name is None:
                raise UserError(f"{where}: field size is missing, and so is the image {annotation.file_name}")
            report.note("no size in the XML file: the image's own", where)
        builder.add_image(name or annotation.file_name, where, annotation.size)
        for sign in annotation.objects:
            if sign.difficult:
                report.note("difficult object: ignored region", sign.where)
            box = box_from_corners(sign.corners, corners, sign.where, report)
            builder.add_box(sign.class_name, box, sign.where, ignored=sign.difficult)
    if missing and images_required:
        raise UserError(
            f"{missing[0].path}: {len(missing)} of {len(wanted)} images are missing, first: {missing[0].file_name}; "
            f"put them into images/ or JPEGImages/ of {folder}"
        )
    images = builder.finish()
    if len(wanted) == len(annotations):
        note_unlisted(folder, (images.name(index) for index in range(len(images))), report)
    return images


def _read_annotation(path: Path) -> _Annotation:
    root = _parse(path)
    file_name = _text(root, "filename", path) if root.find("filename") is not None else path.stem
    place = f"{path}:{root.get(_LINE)}"
    objects = tuple(_object(element, path) for element in root.findall("object"))
    return _Annotation(image_name(file_name, place, "filename"), _size(root, path), objects, path)


def _object(element: Element, path: Path) -> _Object:
    where = f"{path}:{element.get(_LINE)}"
    box = element.find("bndbox")
    if box is None:
        raise UserError(f"{where}: field bndbox of the object is missing")
    x1, y1, x2, y2 = (
        a_number(_text(box, name, path).strip(), f"{path}:{box.get(_LINE)}", f"bndbox.{name}")
        for name in ("xmin", "ymin", "xmax", "ymax")
    )
    difficult = element.find("difficult")
    flag = (difficult.text or "").strip() if difficult is not None else "0"
    if flag not in ("0", "1"):
        raise UserError(f"{where}: field difficult must be 0 or 1, got {flag!r:.40}")
    return _Object(a_text(_text(element, "name", path), where, "name"), (x1, y1, x2, y2), flag == "1", where)


def _size(root: Element, path: Path) -> tuple[int, int] | None:
    """(height, width); None where the file tells none, which some tools write as 0."""
    element = root.find("size")
    if element is None:
        return None
    where = f"{path}:{element.get(_LINE)}"
    height, width = (a_number(_text(element, name, path), where, f"size.{name}") for name in ("height", "width"))
    if (height, width) == (0, 0):
        return None
    if height != int(height) or width != int(width):
        raise UserError(f"{where}: field size must be whole pixels, got {width:g}x{height:g}")
    return int(height), int(width)


def _text(element: Element, name: str, path: Path) -> str:
    found = element.find(name)
    if found is None or not (found.text or "").strip():
        place = element if found is None else found
        raise UserError(
            f"{path}:{place.get(_LINE)}: field {name} of <{element.tag}> is {'missing' if found is None else 'empty'}"
        )
    return found.text or ""


def _parse(path: Path) -> Element:
    """The file's elements, each with its line as the only attribute. A DOCTYPE is refused, and with it all entities."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def start(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag, {_LINE: str(parser.CurrentLineNumber)})

    def refuse(*arguments: object) -> NoReturn:
        raise UserError(f"{path}:{parser.CurrentLineNumber}: DOCTYPE is not allowed in a VOC file; delete it")

    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(path.read_bytes(), True)
        root = builder.close()
    except OSError as error:
        raise UserError(f"{path}: VOC file cannot be read ({error.strerror})") from None
    except (expat.ExpatError, ValueError, LookupError) as error:
        line = getattr(error, "lineno", parser.CurrentLineNumber)
        raise UserError(f"{path}:{line}: VOC file is not XML ({str(error).partition(':')[0]}); is it whole?") from None
    if root.tag != "annotation":
        raise UserError(f"{path}:{root.get(_LINE)}: <annotation> is wanted, got <{root.tag:.40}>; is it a VOC file?")
    return root


def _label_folder(folder: Path) -> Path | None:
    places = (folder / name for name in _LABEL_FOLDERS)
    return next((place for place in places if any(place.glob("*.xml"))), None)


def _wanted(
    folder: Path, annotations: dict[str, _Annotation], split: str, list_name: str, report: ReadReport
) -> list[_Annotation]:
    if list_name:
        path = folder / list_name
    else:
        check_split(split)
        path = folder / "ImageSets" / "Main" / f"{_LISTS[split]}.txt"
        if not path.is_file():
            if split == "train" and not path.parent.is_dir():
                return list(annotations.values())
            raise MissingListError(f"{folder}: no {path.relative_to(folder).as_posix()}, so no images are for {split}")
    wanted = []
    for key, where in read_keys(path, "VOC image list", report).items():
        stem = Path(key).stem if key not in annotations else key
        if stem not in annotations:
            raise UserError(
                f"{where}: image {key:.80} has no XML file; give it one, without objects if it has no signs"
            )
        wanted.append(annotations[stem])
    return wanted


def _find_image(folder: Path, annotation: _Annotation, report: ReadReport) -> str | None:
    """Name of the image relative to the folder."""
    own = Path(annotation.file_name)
    for name in (own.as_posix(), f"{annotation.path.stem}{own.suffix or '.jpg'}"):
        for place in _IMAGE_FOLDERS:
            path = find_image(folder / place / name)
            if path is None:
                continue
            if name != own.as_posix() and own.suffix:
                report.note("filename is not there: the image of the XML file's name", str(annotation.path))
            elif path.suffix != own.suffix and own.suffix:
                report.note(f"image {own.suffix} found as {path.suffix}: used", str(annotation.path))
            return path.relative_to(folder).as_posix()
    return None
