//! The base model's files as they are served to workers: mapped into memory once for all workers, and listed with
//! their hashes, so that a worker can check every received file.

use super::super::message::{Hash, ModelFile, PART, PIECE, ToWorker};
use crate::format::FormatError;
use crate::format::map::Map;
use bytes::Bytes;
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file that cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A file name that is not valid on another machine.
    #[error("{}: its name is no plain file name, so that it cannot be sent to workers: rename it", .0.display())]
    Name(PathBuf),
}

/// A model's files, mapped into memory.
#[derive(Debug, Clone, Default)]
pub struct ModelFiles {
    files: Vec<(ModelFile, Bytes)>,
    /// Lists of the hashes of their parts.
    parts: Vec<(ModelFile, Bytes)>,
}

impl ModelFiles {
    /// Maps and hashes the files of a model that a worker needs.
    pub fn open(model: &Path) -> Result<Self, FilesError> {
        let files = names(model)?.iter().map(|path| one(path)).collect::<Result<_, _>>()?;
        Ok(ModelFiles { files, parts: vec![] })
    }

    /// The same files, with a hash of each part of large files of weights, for workers that fetch parts.
    pub fn in_parts(mut self) -> Self {
        let weights = |name: &str| [".safetensors", ".gguf"].iter().any(|end| name.ends_with(end));
        let large = |file: &ModelFile| weights(&file.name) && file.size > PART as u64;
        let list = |(file, bytes): &(ModelFile, Bytes)| {
            let hashes: Vec<Hash> =
                bytes.par_chunks(PART).map(|part| *blake3::hash(part).as_bytes()).collect();
            let list = Bytes::from(hashes.concat());
            let (name, size) = (format!("{}.parts", file.name), list.len() as u64);
            (ModelFile { name, size, hash: *blake3::hash(&list).as_bytes() }, list)
        };
        self.parts = self.files.iter().filter(|(file, _)| large(file)).map(list).collect();
        self
    }

    /// The files as the manifest lists them.
    pub fn list(&self) -> Vec<ModelFile> {
        self.files.iter().map(|(file, _)| file.clone()).collect()
    }

    /// The lists of the hashes of parts, as the manifest lists them.
    pub fn parts(&self) -> Vec<ModelFile> {
        self.parts.iter().map(|(list, _)| list.clone()).collect()
    }

    /// The pieces that cover `len` bytes from `offset`, or `None` if the file has no such bytes.
    pub fn pieces(&self, file: u32, offset: u64, len: u64) -> Option<impl Iterator<Item = ToWorker> + use<>> {
        let (_, bytes) = self.files.iter().chain(&self.parts).nth(usize::try_from(file).ok()?)?;
        let end = offset.checked_add(len).filter(|&end| end <= bytes.len() as u64)?;
        let bytes = bytes.clone();
        let piece = move |at: u64| {
            let bytes = bytes.slice(at as usize..(at + PIECE as u64).min(end) as usize);
            ToWorker::Piece { file, offset: at, bytes }
        };
        Some((offset..end).step_by(PIECE).map(piece))
    }
}

/// Files that are served besides the weights. A worker's cache holds a complete model, which can be named as MODEL
/// in a later run.
const BESIDE: [&str; 7] = [
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
];

fn names(model: &Path) -> Result<Vec<PathBuf>, FilesError> {
    if !model.is_dir() {
        return Ok(vec![model.to_path_buf()]);
    }
    let entries = std::fs::read_dir(model).map_err(|e| FormatError::io(model, e))?;
    let wanted = |path: &PathBuf| {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        path.extension().is_some_and(|e| e == "safetensors") || BESIDE.contains(&name)
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(wanted).collect();
    found.sort();
    Ok(found)
}

fn one(path: &Path) -> Result<(ModelFile, Bytes), FilesError> {
    let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(|| FilesError::Name(path.to_owned()))?;
    let bytes = Bytes::from_owner(Map::open(path)?);
    let size = bytes.len() as u64;
    let hash: Hash = *blake3::Hasher::new().update_rayon(&bytes).finalize().as_bytes();
    Ok((ModelFile { name: name.to_owned(), size, hash }, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_exactly_the_requested_range() {
        let dir = tempfile::tempdir().unwrap();
        let contents: Vec<u8> = (0..PIECE * 2 + 7).map(|i| (i % 251) as u8).collect();
        std::fs::write(dir.path().join("model.safetensors"), &contents).unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
        let files = ModelFiles::open(dir.path()).unwrap();
        let names: Vec<String> = files.list().into_iter().map(|f| f.name).collect();
        assert_eq!(names, ["config.json", "model.safetensors"]);
        assert_eq!(files.list()[1].hash, *blake3::hash(&contents).as_bytes());
        let size = contents.len() as u64;
        for (offset, len) in [(0, size), (5, PIECE as u64 + 1), (size, 0), (size - 1, 1)] {
            let mut got = Vec::new();
            for piece in files.pieces(1, offset, len).unwrap() {
                let ToWorker::Piece { file: 1, offset: at, bytes } = piece else { panic!("{piece:?}") };
                assert_eq!(at, offset + got.len() as u64);
                assert!(bytes.len() <= PIECE);
                got.extend_from_slice(&bytes);
            }
            assert_eq!(got, contents[offset as usize..(offset + len) as usize]);
        }
        // The list of the parts' hashes follows after the files.
        let files = files.in_parts();
        let [list] = &files.parts()[..] else { panic!("{:?}", files.parts()) };
        assert_eq!((list.name.as_str(), list.size), ("model.safetensors.parts", 32 * 9));
        let Some(ToWorker::Piece { bytes, .. }) = files.pieces(2, 32, 32).unwrap().next() else { panic!() };
        assert_eq!(bytes[..], blake3::hash(&contents[PART..2 * PART]).as_bytes()[..]);
        let files = ModelFiles::open(dir.path()).unwrap();
        for (file, offset, len) in [(2, 0, 0), (1, 0, size + 1), (1, u64::MAX, 2), (1, size + 1, 0)] {
            assert!(files.pieces(file, offset, len).is_none(), "{file} {offset} {len}");
        }
    }
}
