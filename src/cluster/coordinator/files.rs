//! The base model's files as workers may ask for them: mapped once, whoever asks and however many do, and named
//! with their hashes, so that nobody has to believe what arrived.

use super::super::message::{Hash, ModelFile, PIECE, ToWorker};
use crate::format::FormatError;
use crate::format::map::Map;
use bytes::Bytes;
use std::path::{Path, PathBuf};

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file that cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A name that another machine could not use.
    #[error("{}: its name is no plain file name, so that it cannot be sent to workers: rename it", .0.display())]
    Name(PathBuf),
}

/// A model's files, mapped.
#[derive(Debug, Clone, Default)]
pub struct ModelFiles {
    files: Vec<(ModelFile, Bytes)>,
}

impl ModelFiles {
    /// Maps and hashes a model's files: all that a worker needs, and no more.
    pub fn open(model: &Path) -> Result<Self, FilesError> {
        let files = names(model)?.iter().map(|path| one(path)).collect::<Result<_, _>>()?;
        Ok(ModelFiles { files })
    }

    /// As the manifest lists them.
    pub fn list(&self) -> Vec<ModelFile> {
        self.files.iter().map(|(file, _)| file.clone()).collect()
    }

    /// The pieces that cover `len` bytes from `offset`; None where the file has no such bytes.
    pub fn pieces(&self, file: u32, offset: u64, len: u64) -> Option<impl Iterator<Item = ToWorker> + use<>> {
        let (_, bytes) = self.files.get(usize::try_from(file).ok()?)?;
        let end = offset.checked_add(len).filter(|&end| end <= bytes.len() as u64)?;
        let bytes = bytes.clone();
        let piece = move |at: u64| {
            let bytes = bytes.slice(at as usize..(at + PIECE as u64).min(end) as usize);
            ToWorker::Piece { file, offset: at, bytes }
        };
        Some((offset..end).step_by(PIECE).map(piece))
    }
}

/// Beside the weights. What a worker keeps is a whole model, which it can name itself the next time.
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
        for (file, offset, len) in [(2, 0, 0), (1, 0, size + 1), (1, u64::MAX, 2), (1, size + 1, 0)] {
            assert!(files.pieces(file, offset, len).is_none(), "{file} {offset} {len}");
        }
    }
}
