//! Parts of a base model, for a worker that holds some layers of it: a folder beside that of the whole model, in which
//! files have their whole length and holes where nothing was fetched. Each part has a hash of its own, which is checked
//! when the part arrives and at every use; a hole has another hash than its part. Workers of one machine share the
//! folder, and add parts to it.

use super::Outcome;
use super::cache::{Cache, OTHER, check_names, checked_file, fail, holds, opens, span};
use super::outbox::Outbox;
use super::progress;
use crate::cluster::message::{Hash, Manifest, ModelFile, PART, SeatPlan};
use crate::format::{Beginning, Positions, positions};
use crate::model::config::Config;
use crate::numeric::block::Blocks;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tensors of a model that a worker reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Needed {
    /// None: their shapes suffice.
    Shapes,
    /// Tensors of a seat.
    Seat {
        /// Its layers.
        layers: Range<usize>,
        /// Whether the embedding is read.
        embedding: bool,
        /// Whether the head is read.
        head: bool,
    },
}

impl Needed {
    /// Tensors of a seat. The last one reads the embedding too: it may be the head.
    pub fn by(plan: &SeatPlan) -> Self {
        let (layers, head) = (plan.layers.0 as usize..plan.layers.1 as usize, plan.place + 1 == plan.of);
        Needed::Seat { embedding: head || layers.start == 0, layers, head }
    }

    /// The head is a tensor of its own: only the first seat reads the embedding.
    fn has_own_head(&mut self) {
        if let Needed::Seat { layers, embedding, .. } = self {
            *embedding = layers.start == 0;
        }
    }

    /// Whether the tensor of this name is read.
    fn has(&self, name: &str) -> bool {
        let Needed::Seat { layers, embedding, head } = self else { return false };
        match layer_of(name) {
            Some(layer) => layers.contains(&layer),
            None if name.contains("embed_tokens") => *embedding,
            None if name.contains("lm_head") => *head,
            None => true,
        }
    }
}

/// The layer of a tensor: 12 of `model.layers.12.mlp.up_proj.weight`.
fn layer_of(name: &str) -> Option<usize> {
    let (before, after) = name.split_once("layers.")?;
    let number = after.split('.').next()?;
    (before.is_empty() || before.ends_with('.')).then(|| number.parse().ok())?
}

/// Tensors of which some were fetched: to read another one is an error, not a hole.
struct Fetched {
    base: Arc<dyn Tensors>,
    needed: Needed,
}

/// The tensors of a folder of parts.
pub(super) fn guarded(base: Arc<dyn Tensors>, needed: Needed) -> Arc<dyn Tensors> {
    Arc::new(Fetched { base, needed })
}

impl Fetched {
    fn check(&self, name: &str) -> Result<(), String> {
        match self.needed.has(name) {
            true => Ok(()),
            false => Err(format!("{name} was not fetched: it is of another worker's layers")),
        }
    }
}

impl Tensors for Fetched {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        self.check(name)?;
        self.base.tensor(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        self.check(name)?;
        self.base.blocks(name)
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.base.about(name)
    }

    fn names(&self) -> Vec<String> {
        self.base.names()
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.base.file_of(name)
    }

    fn advise(&self, name: &str, when: Use) {
        self.base.advise(name, when);
    }
}

/// A file of which parts are fetched, with the hashes of all parts.
struct InParts {
    index: u32,
    path: PathBuf,
    size: u64,
    hashes: Vec<Hash>,
}

impl Cache {
    /// The path of the run's model with the tensors that are needed, from the cache or fetched. `None` if the model cannot
    /// be had in parts.
    pub(super) async fn obtain_parts(
        &self,
        (manifest, needed): (&Manifest, &mut Needed),
        outbox: &mut Outbox<'_>,
        say: &dyn Fn(&str),
    ) -> Result<Option<PathBuf>, Outcome> {
        if manifest.parts.is_empty() || self.root.join(&manifest.model_hash).is_dir() {
            return Ok(None);
        }
        check_names(manifest)?;
        let dir = self.root.join(format!("{}.parts", contents(manifest)));
        std::fs::create_dir_all(&dir).map_err(|e| fail(&dir, e))?;
        let _lock = self.lock(&manifest.model_hash, outbox, say).await?;
        let large = in_parts(&dir, manifest, outbox).await?;
        let mut found = Vec::new();
        for file in &large {
            found.push(file.header(outbox).await?);
        }
        if has_own_head(&dir, &found) {
            needed.has_own_head();
        }
        let wanted = found.iter().map(|positions| wanted(positions, needed));
        let mut missing = Vec::new();
        for (file, wanted) in large.iter().zip(wanted) {
            missing.push(file.missing(wanted, outbox).await?);
        }
        let total: u64 = manifest.files.iter().map(|file| file.size).sum();
        let bytes: u64 = missing.iter().flatten().map(|run| run.end - run.start).sum();
        if bytes > 0 {
            let (some, all) = (bytes as f64 / 1e6, total as f64 / 1e6);
            say(&format!(
                "fetching parts of {} from the coordinator: {some:.1} of {all:.1} MB",
                manifest.model
            ));
        }
        let come = outbox.come.clone();
        let work = async {
            for (file, runs) in large.iter().zip(missing) {
                for run in runs {
                    file.fetch(run, outbox).await?;
                }
            }
            Ok::<_, Outcome>(())
        };
        progress::during((&come, bytes), say, work).await?;
        Ok(Some(opens(&dir, manifest)))
    }
}

/// The name of the contents: a coordinator that claims the hash of another model must not write into the files of it.
fn contents(manifest: &Manifest) -> String {
    let mut hasher = blake3::Hasher::new();
    for ModelFile { name, size, hash } in manifest.files.iter().chain(&manifest.parts) {
        hasher.update(blake3::hash(name.as_bytes()).as_bytes()).update(&size.to_le_bytes()).update(hash);
    }
    hasher.finalize().to_hex().to_string()
}

/// Fetches the small files, and opens those that come in parts.
async fn in_parts(dir: &Path, manifest: &Manifest, outbox: &mut Outbox<'_>) -> Result<Vec<InParts>, Outcome> {
    let mut large = Vec::new();
    for (index, file) in (0..).zip(&manifest.files) {
        let list = (0..).zip(&manifest.parts).find(|(_, list)| list.name == format!("{}.parts", file.name));
        if let Some((at, list)) = list {
            let list = (manifest.files.len() as u32 + at, list);
            large.push(InParts::open(dir, (index, file), list, outbox).await?);
            continue;
        }
        whole_file(dir, index, file, outbox).await?;
    }
    Ok(large)
}

/// Fetches a file, unless it is there.
async fn whole_file(
    dir: &Path,
    index: u32,
    file: &ModelFile,
    outbox: &mut Outbox<'_>,
) -> Result<(), Outcome> {
    let (of, there) = (dir.to_path_buf(), file.clone());
    if outbox.meanwhile(move || holds(&of, &there)).await? {
        return Ok(());
    }
    checked_file(&dir.join(&file.name), index, file, outbox).await
}

/// Whether the head is a tensor of its own: the files have one, and the configuration says so. Of a GGUF the head itself
/// says so.
fn has_own_head(dir: &Path, found: &[Positions]) -> bool {
    let mut names = found.iter().flat_map(|positions| positions.tensors.keys());
    let config = std::fs::read(dir.join("config.json"));
    let untied = |json: Vec<u8>| {
        let config = serde_json::from_slice(&json).ok().and_then(|json| Config::from_json(&json).ok());
        config.is_some_and(|config| !config.tied)
    };
    config.map_or_else(|e| e.kind() == ErrorKind::NotFound, untied)
        && names.any(|name| name.contains("lm_head"))
}

/// The parts in which the needed tensors are.
fn wanted(positions: &Positions, needed: &Needed) -> BTreeSet<usize> {
    let ranges = positions.tensors.iter().filter(|(name, _)| needed.has(name)).map(|(_, range)| range);
    ranges
        .chain(&positions.shapes)
        .filter(|range| !range.is_empty())
        .flat_map(|range| range.start / PART..=(range.end - 1) / PART)
        .collect()
}

/// Largest list of hashes, in bytes: of a file of 137 GB.
const MOST_LIST: u64 = 16 << 20;

impl InParts {
    /// Fetches the list of hashes, and makes the file where it is not there.
    async fn open(
        dir: &Path,
        (index, file): (u32, &ModelFile),
        (list_index, list): (u32, &ModelFile),
        outbox: &mut Outbox<'_>,
    ) -> Result<Self, Outcome> {
        let path = dir.join(&file.name);
        let lost = |reason: &str| Outcome::Lost { reason: format!("{}: {reason}", list.name) };
        if list.size != file.size.div_ceil(PART as u64).saturating_mul(32) {
            return Err(lost("the list of hashes is too long or too short"));
        }
        if list.size > MOST_LIST {
            return Err(lost("the file is too large to be fetched in parts"));
        }
        whole_file(dir, list_index, list, outbox).await?;
        let hashed = dir.join(&list.name);
        let bytes = std::fs::read(&hashed).map_err(|e| fail(&hashed, e))?;
        let out = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        out.and_then(|out| out.set_len(file.size)).map_err(|e| fail(&path, e))?;
        let hashes = bytes.as_chunks::<32>().0.to_vec();
        Ok(InParts { index, path, size: file.size, hashes })
    }

    /// The tensors of the file, for which its header is fetched.
    async fn header(&self, outbox: &mut Outbox<'_>) -> Result<Positions, Outcome> {
        let mut here = self.size.min(PART as u64);
        loop {
            let parts = 0..here.div_ceil(PART as u64) as usize;
            for run in self.missing(parts.collect(), outbox).await? {
                self.fetch(run, outbox).await?;
            }
            match positions(&self.path, here).map_err(|e| fail(&self.path, e))? {
                Beginning::All(positions) => return Ok(positions),
                // A GGUF says the length of its next string only.
                Beginning::Needs(bytes) => here = bytes.max(2 * here).min(self.size),
            }
        }
    }

    /// The runs of bytes of these parts that are not here.
    async fn missing(
        &self,
        parts: BTreeSet<usize>,
        outbox: &mut Outbox<'_>,
    ) -> Result<Vec<Range<u64>>, Outcome> {
        let (path, hashes, size) = (self.path.clone(), self.hashes.clone(), self.size);
        let found = outbox.meanwhile(move || find_missing(&path, parts, (&hashes, size))).await?;
        found.map_err(|e| fail(&self.path, e))
    }

    /// Fetches a run of whole parts, and writes each that has its hash.
    async fn fetch(&self, run: Range<u64>, outbox: &mut Outbox<'_>) -> Result<(), Outcome> {
        let failed = |e: std::io::Error| fail(&self.path, e);
        let mut out = OpenOptions::new().write(true).open(&self.path).map_err(failed)?;
        let (mut at, mut part) = (run.start, Vec::with_capacity(PART));
        span(self.index, run, outbox, &mut |mut piece: &[u8]| {
            while !piece.is_empty() {
                let len = (self.size - at).min(PART as u64) as usize;
                let (now, later) = piece.split_at(piece.len().min(len - part.len()));
                part.extend_from_slice(now);
                piece = later;
                if part.len() == len {
                    if *blake3::hash(&part).as_bytes() != self.hashes[(at / PART as u64) as usize] {
                        return Err(fail(&self.path, OTHER));
                    }
                    out.seek(SeekFrom::Start(at)).and_then(|_| out.write_all(&part)).map_err(failed)?;
                    at += len as u64;
                    part.clear();
                }
            }
            Ok(())
        })
        .await?;
        out.sync_all().map_err(failed)
    }
}

fn find_missing(
    path: &Path,
    parts: BTreeSet<usize>,
    (hashes, size): (&[Hash], u64),
) -> std::io::Result<Vec<Range<u64>>> {
    let (mut file, mut runs, mut bytes) = (File::open(path)?, Vec::<Range<u64>>::new(), Vec::new());
    for part in parts.into_iter().filter(|part| *part < hashes.len()) {
        let from = (part * PART) as u64;
        let to = size.min(from + PART as u64);
        file.seek(SeekFrom::Start(from))?;
        bytes.clear();
        Read::by_ref(&mut file).take(to - from).read_to_end(&mut bytes)?;
        if *blake3::hash(&bytes).as_bytes() == hashes[part] {
            continue;
        }
        match runs.last_mut().filter(|run| run.end == from) {
            Some(run) => run.end = to,
            None => runs.push(from..to),
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_reads_its_layers_and_its_ends() {
        let names = [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.language_model.layers.1.self_attn.q_proj.weight",
            "layers.12.input_layernorm.weight",
            "model.norm.weight",
            "lm_head.weight",
        ];
        let read = |layers: Range<usize>, own_head| {
            let head = layers.end == 13;
            let mut needed = Needed::Seat { embedding: head || layers.start == 0, layers, head };
            if own_head {
                needed.has_own_head();
            }
            names.map(|name| u8::from(needed.has(name)))
        };
        assert_eq!(read(0..1, false), [1, 1, 0, 0, 1, 0]);
        assert_eq!(read(1..12, false), [0, 0, 1, 0, 1, 0]);
        assert_eq!(read(12..13, false), [1, 0, 0, 1, 1, 1]);
        assert_eq!(read(12..13, true), [0, 0, 0, 1, 1, 1]);
        assert_eq!(read(0..13, true), [1; 6]);
        assert_eq!(names.map(|name| u8::from(Needed::Shapes.has(name))), [0; 6]);
    }
}
