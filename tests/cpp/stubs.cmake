# Libraries of our own making in place of those that need hardware. Included by the tests and the fuzz
# targets.
function(add_stub name)
  add_library(${name} SHARED ${ARGN})
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests
                                           CXX_VISIBILITY_PRESET hidden)
endfunction()
function(sanitize_stub name)  # one that does not link the core, which brings it
  if(SMDDP_SANITIZE AND NOT SMDDP_FUZZ)
    target_compile_options(${name} PRIVATE -fsanitize=${SMDDP_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${SMDDP_SANITIZE})
  endif()
endfunction()

# libfabric, for the providers that need hardware.
file(GLOB stub CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/stub_fabric/*.cc)
add_stub(stub_fabric ${stub})
target_include_directories(stub_fabric PRIVATE ${CMAKE_CURRENT_LIST_DIR} ${CMAKE_SOURCE_DIR}/csrc)
target_include_directories(stub_fabric SYSTEM PRIVATE ${LIBFABRIC_INCLUDE})
sanitize_stub(stub_fabric)
