use super::*;
use std::fs;

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// What a damaged file is told, and that it is told in one line with the file's name.
fn check(bytes: &[u8], said: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    let error = open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains(said) && error.contains("model.safetensors"), "{error:?} lacks {said:?}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn damaged_files_are_named() {
    let two = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    check(&file(two, 11), "tensor 'b': bytes 8..12 of 11: the file is cut short");
    check(&file(two, 13), "1 bytes at its end");
    check(&file(&two.replace("[8,12]", "[4,8]"), 8), "tensor 'b': overlaps tensor 'a'");
    check(&file(&two.replace("[8,12]", "[10,14]"), 14), "tensor 'b': 2 bytes before it");
    check(&file(&two.replace("[8,12]", "[12,8]"), 12), "tensor 'b': bytes 12..8");
    check(&file(&two.replace("\"b\"", "\"a\""), 12), "tensor 'a': appears twice");
    check(&file(&two.replace("[2]", "[3]"), 12), "tensor 'a': shape [3]");
    check(&file(&two.replace("[2]", "[4294967296,4294967296,4294967296]"), 12), "tensor 'a': shape");
    check(&file(&two.replace("[2]", "[-2]"), 12), "header is not valid");
    check(&file(&two.replace("\"F32\",\"shape\":[1]", "\"F8_E4M3\",\"shape\":[4]"), 12), "'b' is F8_E4M3");
    check(&file(&two.replace("\"F32\",\"shape\":[1]", "\"Q9\",\"shape\":[4]"), 12), "'b' is Q9");
    check(&file("{", 0), "header is not valid");
    check(&file(&"[".repeat(100_000), 0), "header is not valid");
    check(b"", "not a safetensors file: 0 bytes");
    check(&u64::MAX.to_le_bytes(), "header of 18446744073709551615 bytes");
    check(b"\x80\x02ccollections", "header of");
}

#[test]
fn every_truncated_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let spec = |name: &str, n| Spec { name: name.into(), dtype: Dtype::F32, shape: vec![n, 2] };
    write(&path, &[(spec("b", 1), &[1; 8]), (spec("a", 2), &[2; 16])]).unwrap();
    let whole = fs::read(&path).unwrap();
    for n in 0..whole.len() {
        fs::write(&path, &whole[..n]).unwrap();
        assert!(open(&path).is_err(), "{n} of {}", whole.len());
    }
}

#[test]
fn written_files_are_readable_by_us_and_the_reference_crate() {
    let dir = tempfile::tempdir().unwrap();
    let specs: Vec<Spec> =
        [("a", Dtype::F32, vec![2, 3]), ("b", Dtype::Bf16, vec![5]), ("c", Dtype::F16, vec![0, 4])]
            .map(|(name, dtype, shape)| Spec { name: name.into(), dtype, shape })
            .to_vec();
    let bytes = |i: usize| Ok(Cow::Owned((0..specs[i].bytes()).map(|b| (b * 7 + i) as u8).collect()));
    for (most, files) in [(1 << 20, 1), (24, 2), (1, 2)] {
        let out = dir.path().join(most.to_string());
        write_sharded(&out, &specs, most, bytes).unwrap();
        let found = fs::read_dir(&out)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|e| e == "safetensors"));
        assert!(found.count() >= files);
        let read = Sharded::open(&out).unwrap();
        assert_eq!(read.names(), ["a", "b", "c"]);
        for (i, spec) in specs.iter().enumerate() {
            let tensor = read.tensor(&spec.name).unwrap().unwrap();
            assert_eq!((&tensor.shape, tensor.dtype), (&spec.shape, spec.dtype));
            assert_eq!(tensor.bytes, bytes(i).unwrap());
        }
    }
    let raw = fs::read(dir.path().join("1048576/model.safetensors")).unwrap();
    let reference = ::safetensors::SafeTensors::deserialize(&raw).unwrap();
    assert_eq!(reference.tensor("b").unwrap().data(), &*bytes(1).unwrap());
    assert_eq!((raw.len() - specs.iter().map(Spec::bytes).sum::<usize>()) % 8, 0);
}

#[test]
fn a_missing_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let specs: Vec<Spec> =
        ["a", "b"].map(|n| Spec { name: n.into(), dtype: Dtype::F32, shape: vec![4] }).to_vec();
    write_sharded(dir.path(), &specs, 16, |_| Ok(Cow::Owned(vec![0; 16]))).unwrap();
    let gone = dir.path().join("model-00002-of-00002.safetensors");
    fs::remove_file(&gone).unwrap();
    let said = |dir: &Path| Sharded::open(dir).map(drop).unwrap_err().to_string();
    assert!(said(dir.path()).contains("shard 'model-00002-of-00002.safetensors' is missing"));
    fs::copy(dir.path().join("model-00001-of-00002.safetensors"), gone).unwrap();
    assert!(said(dir.path()).contains("tensor 'a': also in"));
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(index, r#"{"weight_map":{"a":"../../secret.safetensors"}}"#).unwrap();
    assert!(said(dir.path()).contains("is not the name of a shard"));
}
