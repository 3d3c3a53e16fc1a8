//! Matrices inside device memory, as verbs take them: contiguous, row-major, rows are tokens.

/// A contiguous row-major matrix inside device memory, read only.
#[derive(Debug)]
pub struct View<'a, M> {
    /// The memory of the matrix.
    pub memory: &'a M,
    /// First element.
    pub offset: usize,
    /// Rows, usually tokens.
    pub rows: usize,
    /// Columns, usually channels; also the distance between rows.
    pub cols: usize,
}

impl<M> Clone for View<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for View<'_, M> {}

/// A contiguous row-major matrix inside device memory that a verb writes.
#[derive(Debug)]
pub struct ViewMut<'a, M> {
    /// The memory of the matrix.
    pub memory: &'a mut M,
    /// First element.
    pub offset: usize,
    /// Rows, usually tokens.
    pub rows: usize,
    /// Columns, usually channels; also the distance between rows.
    pub cols: usize,
}

/// A view of the first rows x cols elements.
pub fn view<M>(memory: &M, rows: usize, cols: usize) -> View<'_, M> {
    View { memory, offset: 0, rows, cols }
}

/// A writable view of the first rows x cols elements.
pub fn view_mut<M>(memory: &mut M, rows: usize, cols: usize) -> ViewMut<'_, M> {
    ViewMut { memory, offset: 0, rows, cols }
}

impl<'a, M> View<'a, M> {
    /// Rows `from .. from + rows`.
    pub fn rows(self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "a view stays inside its matrix");
        View { offset: self.offset + from * self.cols, rows, ..self }
    }

    /// Elements in the view.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// True where there is nothing to see.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, M> ViewMut<'a, M> {
    /// Rows `from .. from + rows`.
    pub fn rows(self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "a view stays inside its matrix");
        ViewMut { offset: self.offset + from * self.cols, rows, ..self }
    }

    /// The same matrix, borrowed for a shorter time.
    pub fn again(&mut self) -> ViewMut<'_, M> {
        ViewMut { memory: self.memory, offset: self.offset, rows: self.rows, cols: self.cols }
    }

    /// Elements in the view.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// True where there is nothing to see.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
