//! Pictures as files for programs that are not browsers: drawn elements have literal colours, and librsvg renders them.
//! `rsvg-convert` is Debian's librsvg2-bin; without it that part prints `skipped`, unless FINETUNE_NEED_RSVG is set.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;

/// The light colours of the background, of the training curve and of the evaluation's.
const PAPER: [u8; 3] = [0xfc, 0xfc, 0xfb];
const TRAINING: [u8; 3] = [0x2a, 0x78, 0xd6];
const EVALUATION: [u8; 3] = [0xe0, 0x57, 0x2f];

/// Checks every picture in `dir`; there are `count`.
pub fn check(dir: &Path, count: usize) {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "svg")).collect();
    assert_eq!(files.len(), count, "{files:?}");
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        literal(&name, &std::fs::read_to_string(file).unwrap());
    }
    rendered(&dir.join("loss.svg"));
}

/// Each drawn element has a fill and, if it is a line, a stroke that any program supports; each element is closed.
fn literal(name: &str, text: &str) {
    let (mut open, mut drawn) = (Vec::new(), 0);
    for piece in text.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("{name}: {piece}"));
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "{name}");
            continue;
        }
        let element = tag.split([' ', '/']).next().unwrap();
        if !tag.ends_with('/') {
            open.push(element);
        }
        let attributes = attributes(&tag[element.len()..]);
        let colour = |key: &str| attributes.get(key).is_some_and(|v| v.starts_with('#') && v.len() == 7);
        let visible = match element {
            "svg" | "title" | "style" => continue,
            "line" => colour("stroke"),
            "path" => colour("stroke") && attributes.get("fill") == Some(&"none"),
            "text" | "rect" | "circle" => colour("fill"),
            other => panic!("{name}: {other}: no colours are known for it"),
        };
        assert!(visible, "{name}: <{tag}>");
        assert!(!tag.contains("var("), "{name}: <{tag}>");
        drawn += 1;
    }
    assert!(open.is_empty() && drawn > 10, "{name}: {drawn} elements, {open:?} not closed");
}

/// Names and values of ` a="b" c="d"`.
fn attributes(text: &str) -> HashMap<&str, &str> {
    let mut parts = text.split('"');
    let mut found = HashMap::new();
    while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
        found.insert(name.trim().trim_end_matches('='), value);
    }
    found
}

fn rendered(picture: &Path) {
    let Ok(output) = Command::new("rsvg-convert").arg(picture).output() else {
        assert!(std::env::var_os("FINETUNE_NEED_RSVG").is_none(), "rsvg-convert must be installed here");
        return eprintln!("skipped: no rsvg-convert");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let pixels = pixels(&output.stdout);
    let share = |colour: [u8; 3]| {
        pixels.iter().filter(|pixel| **pixel == colour).count() as f64 / pixels.len() as f64
    };
    assert_eq!(pixels[0], PAPER, "the corner");
    assert!(share(PAPER) > 0.8, "{:.3} of it is paper", share(PAPER));
    assert!(share([0, 0, 0]) == 0.0, "{:.3} of it is black", share([0, 0, 0]));
    for curve in [TRAINING, EVALUATION] {
        assert!(share(curve) > 1e-3, "{curve:?} covers {:.5}", share(curve));
    }
}

/// Red, green and blue of every pixel of a PNG of 8 bits a channel that is not interlaced.
fn pixels(png: &[u8]) -> Vec<[u8; 3]> {
    let (mut at, mut packed, mut header) = (8, Vec::new(), [0; 13]);
    while at < png.len() {
        let length = u32::from_be_bytes(png[at..at + 4].try_into().unwrap()) as usize;
        let data = &png[at + 8..at + 8 + length];
        match &png[at + 4..at + 8] {
            b"IHDR" => header.copy_from_slice(data),
            b"IDAT" => packed.extend(data),
            _ => {}
        }
        at += length + 12;
    }
    let width = u32::from_be_bytes(header[..4].try_into().unwrap()) as usize;
    let channels = match (header[8], header[9], header[12]) {
        (8, 2, 0) => 3,
        (8, 6, 0) => 4,
        other => panic!("a PNG of another kind: {other:?}"),
    };
    let mut raw = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut raw).unwrap();
    let (mut above, mut out) = (vec![0; width * channels], Vec::new());
    for row in raw.chunks(width * channels + 1) {
        let mut line = row[1..].to_vec();
        for i in 0..line.len() {
            let left = if i < channels { 0 } else { line[i - channels] };
            let corner = if i < channels { 0 } else { above[i - channels] };
            let guess = match row[0] {
                0 => 0,
                1 => left,
                2 => above[i],
                3 => ((u16::from(left) + u16::from(above[i])) / 2) as u8,
                _ => paeth(left, above[i], corner),
            };
            line[i] = line[i].wrapping_add(guess);
        }
        out.extend(line.chunks(channels).map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        above = line;
    }
    out
}

/// The neighbour of the three that is nearest to left + above - corner. (PNG, 9.4)
fn paeth(left: u8, above: u8, corner: u8) -> u8 {
    let [a, b, c] = [left, above, corner].map(i16::from);
    let p = a + b - c;
    let (to_a, to_b, to_c) = ((p - a).abs(), (p - b).abs(), (p - c).abs());
    if to_a <= to_b && to_a <= to_c {
        left
    } else if to_b <= to_c {
        above
    } else {
        corner
    }
}
